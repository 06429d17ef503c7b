"""Start processes on this machine: the ranks of a run and the models of a search."""
