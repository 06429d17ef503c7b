"""Callbacks that write checkpoints."""
