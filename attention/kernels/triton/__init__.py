"""Triton kernels that every GPU backend shares, for what no kernel library does.

Owns the kernels and their launches over plain tensors. Knows the cache layout, but no backend, no
metadata and no configuration. Nothing here allocates, copies to the host or waits for the GPU, so
that all of it can be captured in a CUDA graph. Modules are imported only where Triton is there.
"""

__all__: list[str] = []
