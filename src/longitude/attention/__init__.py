"""One operation, its masks, backends, caches and layers. It depends on terms, and on no single encoding."""
