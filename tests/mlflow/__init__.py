"""Runs and models in MLflow, on a real tracking server."""
