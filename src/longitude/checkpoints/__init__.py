"""Checkpoints: the positions that a config.json declares, and how a model is loaded. Nothing here measures or writes."""
