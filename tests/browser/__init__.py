"""Tests in a real browser with a real JupyterLab: what its user sees and presses while cells train."""
