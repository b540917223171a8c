"""Records of runs: what is in the file of one, and how several are found and compared."""
