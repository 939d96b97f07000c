"""What the torch_sdpa backend plans: what all layers of a group share in one step.

Several ways lead through a layer. A fresh prompt reads its own keys and never the cache. A span is
a query of several tokens, cut into tiles that see no more keys than they need. Decodes go to a
kernel that reads the cache where it lies; where that is not to be had, they go in chunks, runs of
decodes of similar length whose blocks are gathered side by side.
"""

from typing import NamedTuple

import torch

from attention.cpu.decode import DecodeChunk
from attention.cpu.gather import Gather
from attention.cpu.write import WritePlan
from attention.kernels.cpu.paged_decode import DecodeRows

__all__ = ["GroupPlan", "Prompts", "Span", "Tile"]


class Prompts(NamedTuple):
    """Adjacent prompts of equal length that need no more than causality, or not even that."""

    start: int
    """First token row."""
    num_prompts: int
    num_tokens: int
    """Tokens of each prompt."""


class Tile(NamedTuple):
    """A run of query rows and the run of keys that they see between them."""

    query_start: int
    query_stop: int
    """Token rows of the step."""
    key_start: int
    key_stop: int
    """Keys of the span."""
    bias: torch.Tensor | None


class Span(NamedTuple):
    """One sequence with a query of several tokens."""

    keys: Gather | slice
    """How to read the cache, or which of the keys that the step computes are the sequence's."""
    tiles: tuple[Tile, ...]


class GroupPlan(NamedTuple):
    """One step of the layers with equal parameters."""

    prompts: tuple[Prompts, ...] = ()
    spans: tuple[Span, ...] = ()
    chunks: tuple[DecodeChunk, ...] = ()
    decodes: DecodeRows | None = None
    """What goes to the kernel."""
    write: WritePlan | None = None
    """Where keys and values go; None if nowhere."""
    num_padding: int = 0
    """Token rows at the end that come out as zero."""
    keyless_rows: torch.Tensor | None = None
    """Token rows that see no key and come out as zero, if there are any."""
