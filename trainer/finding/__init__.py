"""What to set before a run: the learning rate, and the largest micro-batch that fits."""
