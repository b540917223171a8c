"""A cluster at one moment and its history, made from reports."""
