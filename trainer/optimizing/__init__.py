"""From gradients to new weights: optimizers, their turns, schedules, clipping, averages."""
