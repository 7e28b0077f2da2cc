"""Programs out of tasks: torch follows the computation, a file keeps it."""
