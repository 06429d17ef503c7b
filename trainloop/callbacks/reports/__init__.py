"""Callbacks that report: trackers, TensorBoard, metrics of whole datasets, an experiment's folder."""
