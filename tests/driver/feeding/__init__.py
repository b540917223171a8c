"""The driver's side of feeding: calls of ``train``, streams, and the watch over rows that wait."""
