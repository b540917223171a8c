"""GPUs, memory and output of a process."""
