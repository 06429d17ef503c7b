"""State of a training: collected for checkpoints, checked, and loaded into another run."""
