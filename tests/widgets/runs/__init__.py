"""The table of recorded runs for the page: its rows, its answers and the widget."""
