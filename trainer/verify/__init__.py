"""Whether several processes train as one does: a few steps of both, compared."""
