"""What more ranks would bring: a task measured here, and simulated on up to thousands of ranks."""
