"""Triton kernels for GPUs, imported on use."""
