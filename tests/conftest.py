"""Lets test modules in any folder below import ``support``."""
