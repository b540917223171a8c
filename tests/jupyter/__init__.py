"""The kernel's web server: pages that are logged in reach it, others do not."""
