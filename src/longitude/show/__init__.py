"""What an encoding, a mixer, a checkpoint or a study's models do with position, drawn by the classes that run."""
