"""Callbacks that watch a run: values that are not finite, failing steps, time."""
