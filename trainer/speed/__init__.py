"""What is measured of a run: how fast, where the time goes, how much memory."""
