"""Show recorded runs as a table in a widget: its data, the answers to the page's questions, and its display.

The input is :class:`~tfos_nb.records.runs.Runs`. The output is a widget, or static HTML. ``magics`` loads this package
by its name.
"""
