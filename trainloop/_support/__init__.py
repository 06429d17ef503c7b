"""Code that several packages share. Internal: don't import from here; names change without notice."""
