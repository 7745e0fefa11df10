"""Kernels: how those in C are built and loaded, and what every kernel requires of its tensors."""
