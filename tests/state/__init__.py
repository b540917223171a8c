"""A cluster's state and history, made from reports."""
