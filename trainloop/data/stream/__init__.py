"""Loaders of iterable datasets, and their positions."""
