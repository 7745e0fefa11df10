"""Kernels: how those in C are built and loaded, and which tensors and modes of torch a kernel supports."""
