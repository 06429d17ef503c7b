"""Callbacks that work on weights: gradients, averages, schedules of the learning rate."""
