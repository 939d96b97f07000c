"""Parts that all GPU backends share: uploads, plans, cache writes, graphs and shared kernels.

Knows no kernel library: a backend adds a builder and its kernels.
"""

__all__: list[str] = []
