"""The cost of a step beside the loop written by hand: ``make bench`` runs all and writes ``benchmarks/RESULTS.rst``."""
