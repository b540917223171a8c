"""States from which training resumes: complete or absent, and the same on all nodes."""
