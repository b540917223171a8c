"""What an object shows at the end of a cell, as HTML and as text."""
