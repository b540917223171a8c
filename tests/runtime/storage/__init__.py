"""Files of any file system: written whole or not at all, and errors if a place cannot be reached."""
