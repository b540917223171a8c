"""The kernel's web server, as a page that is logged in reaches it, and everybody else does not."""
