"""Tells which arm of a double spiral a point lies on: a small project that uses the trainer."""
