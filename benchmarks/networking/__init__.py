"""Hosts in network namespaces, with a limited bandwidth between them, and what runs in them."""
