"""Lines and cells of the magics: most in a shell whose clusters need no Spark, some in a kernel or on real nodes."""
