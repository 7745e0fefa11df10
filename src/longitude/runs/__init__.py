"""Run directories and what every verb shares: files that are whole or not there, locks, progress, memory, provenance."""
