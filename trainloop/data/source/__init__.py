"""Sources of a rank's batches: one class for each kind of loader."""
