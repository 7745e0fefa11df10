"""Triton kernels for attention with a relative position bias or a forget gate, as fast as attention without bias.

Read `kernels` first: forward and backward. `launch` calls them. `intervals` converts a mask to an interval of keys for each
query. `backend` declares what is supported, and defines the gradients for torch.
"""
