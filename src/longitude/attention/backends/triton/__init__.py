"""Attention with a bias of the offset, or a forget gate, on a GPU at the speed of plain attention: kernels in Triton.

`kernels` are forward and backward, to be read first; `launch` calls them; `intervals` makes of a mask one interval of keys for
each query; `backend` says what it takes, and gives torch the gradients.
"""
