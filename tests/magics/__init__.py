"""Lines and cells of the magics: most tests use a shell and clusters without Spark, some a kernel or real nodes."""
