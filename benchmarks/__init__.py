"""The cost of a step, compared with a hand-written PyTorch loop: ``make bench`` runs all and writes ``RESULTS.rst``."""
