"""Checkpoints: what a config.json says of positions, and how a model is loaded. Nothing here measures or writes."""
