"""Where a run is executed: in this process or in ranks, and what comes back from there."""
