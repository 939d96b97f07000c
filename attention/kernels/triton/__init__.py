"""Triton kernels that every GPU backend shares.

Owns the kernels and their launches over plain tensors. Knows the cache layout, but no backend,
metadata or configuration. Nothing here allocates, copies to the host or waits for the GPU, except
that norms and gates allocate their results, so all of it can be captured in a CUDA graph. Modules
are imported only where Triton is installed.
"""

__all__: list[str] = []
