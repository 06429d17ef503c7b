"""What several packages share. Internal: no user imports from here, and names change without notice."""
