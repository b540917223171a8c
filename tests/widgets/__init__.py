"""A cluster as text, as HTML and as a page, in every host and in a real browser."""
