"""`longitude show`: what an encoding, a mixer, a checkpoint or a study's models do with position, drawn from the classes that run."""
