"""Loaders as users pass them, and the copies that ranks read."""
