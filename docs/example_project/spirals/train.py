"""Learn to tell the arms of a double spiral apart.

python -m spirals.train trainer.devices=2
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from trainer import hydra_main, run


@hydra_main(config_path="conf", config_name="config")
def main(cfg: DictConfig) -> Any:
    """Do what the config says."""
    return run(cfg)


if __name__ == "__main__":
    main()
