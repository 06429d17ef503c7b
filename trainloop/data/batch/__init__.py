"""Batches: their sizes and parts, the random states around them, and errors in the code that makes them."""
