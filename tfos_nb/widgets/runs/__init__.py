"""The table of recorded runs as a widget: its data, the answers to the page's questions, and its display."""
