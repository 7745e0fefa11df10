"""Drawings of encodings, mixers, checkpoints and a study's models, computed by the classes that run."""
