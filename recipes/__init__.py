"""Complete training runs, a page each: data, a task, and a command line."""
