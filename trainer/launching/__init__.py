"""Who starts the ranks, on which machines, and how their processes begin, talk and end."""
