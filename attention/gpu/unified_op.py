"""Attention with its cache write as one torch op, which compilers and graphs do not look into.

An op takes tensors and numbers only, so metadata goes by a handle: a number that stands for it
as long as it lives.
"""

from collections.abc import Callable
from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary

import torch

__all__ = ["AttentionOp", "LayerRunner", "define_op", "handle_of"]

AttentionOp = Callable[
    [
        torch.Tensor,
        torch.Tensor | None,
        torch.Tensor | None,
        torch.Tensor,
        torch.Tensor,
        int,
        int,
    ],
    None,
]
"""Query, key, value, cache, out, the metadata's handle, the layer's index."""


class LayerRunner(Protocol):
    """What a handle stands for."""

    def run_layer(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write a layer's keys and values to the cache, and attend."""


_SCHEMA = (
    "(Tensor query, Tensor? key, Tensor? value, Tensor(a!) kv_cache, Tensor(b!) out, "
    "int metadata, int layer_index) -> ()"
)
_library = torch.library.Library("pagedray", "DEF")
# The only way from a number that passed through an op back to the object.
_alive: WeakValueDictionary[int, LayerRunner] = WeakValueDictionary()
_handles = count()


def handle_of(runner: LayerRunner) -> int:
    """Return a number that stands for metadata as long as it lives; ask once for each."""
    handle = next(_handles)
    _alive[handle] = runner
    return handle


def define_op(name: str) -> AttentionOp:
    """Return the op `pagedray::name`, newly registered."""
    _library.define(name + _SCHEMA)
    # One body for all devices; a compiler is told that it returns nothing and what it changes.
    _library.impl(name, _run, "CUDA")
    _library.impl(name, _run, "CPU")
    _library.impl(name, _run_fake, "Meta")
    op: AttentionOp = getattr(torch.ops.pagedray, name).default
    return op


def _run(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    metadata: int,
    layer_index: int,
) -> None:
    _alive[metadata].run_layer(layer_index, query, key, value, kv_cache, out)


def _run_fake(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    metadata: int,
    layer_index: int,
) -> None:
    """Compute nothing, as tensors without data have none."""
