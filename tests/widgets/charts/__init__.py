"""The scripts that draw charts in a page."""
