"""Files on any file system: written completely or not at all, with an error if a location cannot be reached."""
