"""What `benchmarks.memory` starts: the same training by hand and with the Trainer."""
