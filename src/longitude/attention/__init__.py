"""One operation, its masks, backends, cache and layer. Knows terms, and no encoding's name."""
