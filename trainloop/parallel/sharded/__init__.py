"""Models whose parameters are sharded over ranks: their units, shards and gradients, and what can't work with them."""
