"""The scratch memory of decodes, which grows with the steps that need it."""

import torch

from attention.kernels.decode_items import DecodeScratch

__all__ = ["DecodeMemory"]


class DecodeMemory:
    """Lends the same memory to all decodes that are launched on one stream.

    If more is needed, new memory is allocated. Memory returned before stays valid while the caller
    holds it.
    """

    def __init__(self, device: torch.device) -> None:
        self._latest = DecodeScratch(
            torch.empty(0, dtype=torch.float32, device=device),
            torch.zeros(0, dtype=torch.int32, device=device),
        )

    def reserve(self, num_elements: int, num_arrivals: int) -> DecodeScratch:
        """Return memory of at least this many elements of each tensor."""
        parts, arrivals = self._latest.parts, self._latest.arrivals
        if num_elements > len(parts):
            parts = parts.new_empty(num_elements)
        if num_arrivals > len(arrivals):
            arrivals = arrivals.new_zeros(num_arrivals)
        if parts is not self._latest.parts or arrivals is not self._latest.arrivals:
            self._latest = DecodeScratch(parts, arrivals)
        return self._latest
