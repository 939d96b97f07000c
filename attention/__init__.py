"""Attention over a paged KV cache.

Owns the abstract interface, the cache layout and the backends. Knows torch; never Ray.
"""

__all__: list[str] = []
