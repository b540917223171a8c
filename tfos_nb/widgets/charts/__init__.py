"""Charts of a training's metrics: as static SVG, and the data and the script of those that a page draws.

The input is a training curve (:mod:`tfos_nb.state.training_curve`). The output is SVG in HTML, and JavaScript. Only
``widgets``, ``widgets.reprs`` and ``widgets.runs`` import this package.
"""
