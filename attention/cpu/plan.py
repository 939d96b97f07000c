"""Plans of torch_sdpa on a CPU, each shared by layers with equal parameters in one step.

Kernels compute prefills and decodes over the cache in place. Where they are not available, torch
does: prompts without context read their own keys and not the cache, a span is a query of several
tokens, split into tiles that read no more keys than they see, and decodes of similar length are
gathered in chunks.
"""

from typing import NamedTuple

import torch

from attention.cpu.buffers import WritePlan
from attention.cpu.decode import DecodeChunk, Gather
from attention.kernels.cpu.paged_decode import DecodeBatch, PrefillBatch

__all__ = ["LayerPlan", "Prompts", "Span", "Tile"]


class Prompts(NamedTuple):
    """Adjacent prompts of equal length, with a causal mask or no mask."""

    start: int
    """First token of the step."""
    num_prompts: int
    num_tokens: int
    """Tokens of each prompt."""


class Tile(NamedTuple):
    """Adjacent queries and the keys that any of them sees."""

    query_start: int
    query_stop: int
    """Tokens of the step."""
    key_start: int
    key_stop: int
    """Keys of the span."""
    bias: torch.Tensor | None


class Span(NamedTuple):
    """One sequence with a query of several tokens."""

    keys: Gather | slice
    """The read of the cache, or the sequence's own tokens in the step."""
    tiles: tuple[Tile, ...]


class LayerPlan(NamedTuple):
    """One step of layers with equal parameters."""

    prompts: tuple[Prompts, ...] = ()
    spans: tuple[Span, ...] = ()
    chunks: tuple[DecodeChunk, ...] = ()
    prefills: PrefillBatch | None = None
    """The prefills that the kernel computes."""
    decodes: DecodeBatch | None = None
    """The decodes that the kernel computes."""
    write: WritePlan | None = None
    """Where keys and values are written; None without a cache."""
    num_padding: int = 0
    """Tokens at the end with a result of zero."""
    keyless_tokens: torch.Tensor | None = None
    """Tokens that see no key and get a result of zero; None without such tokens."""
