"""Run directories and helpers of all commands: files that are whole or not there, locks, progress, memory, provenance."""
