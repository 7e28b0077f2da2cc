"""What `benchmarks.soak` is made of: the run under attack, its surveillance, and the faults."""
