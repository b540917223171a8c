"""Charts of a training's metrics: as static SVG, and the data and the script of those that a page draws."""
