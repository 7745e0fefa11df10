"""What one family of published models needs beyond the common rules."""
