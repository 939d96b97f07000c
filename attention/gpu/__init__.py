"""The skeleton of every backend on a GPU: upload, plan, cache write, graphs.

Knows the shared kernels, but no kernel library: a backend adds its groups of layers.
"""

__all__: list[str] = []
