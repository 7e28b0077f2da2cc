"""From a command line to a composed config: Hydra, with our errors, help and presets."""
