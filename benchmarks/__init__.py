"""Measurements beside hand-written loops and other trainers."""
