"""Records of runs: the file of a run, and how runs are found and compared."""
