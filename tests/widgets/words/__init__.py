"""Words, numbers and curves that all views show."""
