"""Products of reflections between keys and queries: attention in memory linear in the length."""
