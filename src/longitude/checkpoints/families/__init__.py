"""Special rules for families of published models."""
