"""What is told when a rank fails, hangs or dies: once, with the rank, the step and the stacks."""
