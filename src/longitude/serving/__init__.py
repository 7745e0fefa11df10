"""What an engine makes of a line that serves a model: lengths and rotations, before a GPU is rented."""
