"""From what a user gives as data to the micro-batches of one rank."""
