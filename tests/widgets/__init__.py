"""A cluster as text, as HTML and as a page: what each shows, in every host and in a real browser."""
