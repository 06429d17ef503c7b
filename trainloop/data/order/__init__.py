"""The order of samples: which rank gets which indices."""
