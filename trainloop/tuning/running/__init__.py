"""A search as it runs: its trials, and their folds in processes of this machine or of Ray."""
