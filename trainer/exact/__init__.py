"""Sums that are the same at every world size, bit for bit."""
