"""A rank at work, without training: the placed model, its evaluation, and its losses."""
