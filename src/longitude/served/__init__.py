"""Laws for a model on a server: what it does with position, from questions and log-probabilities alone."""
