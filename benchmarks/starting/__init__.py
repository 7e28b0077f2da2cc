"""What `benchmarks.startup` starts: the same training, as a user writes it with each trainer."""
