"""A real browser in a real JupyterLab: what its user sees and presses while cells train."""
