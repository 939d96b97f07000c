"""Cache write and attention as one torch op, which is opaque to compilers and graphs.

An op takes tensors and numbers only, so it identifies the metadata by a handle: a number that is
valid as long as the metadata lives.
"""

from collections.abc import Callable
from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from attention.abstract import AttentionInputs

__all__ = ["AttentionOp", "OpTarget", "define_op", "handle_of"]

AttentionOp = Callable[
    [
        torch.Tensor,
        torch.Tensor | None,
        torch.Tensor | None,
        torch.Tensor | None,
        torch.Tensor,
        torch.Tensor,
        int,
        int,
    ],
    None,
]
"""Query, key, value, sinks, cache, out, the metadata's handle, the layer's index."""


class OpTarget(Protocol):
    """The object that a handle identifies."""

    def attend(
        self,
        layer_index: int,
        inputs: AttentionInputs,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write a layer's keys and values to the cache, and attend."""


_SCHEMA = (
    "(Tensor query, Tensor? key, Tensor? value, Tensor? sinks, Tensor(a!) kv_cache, "
    "Tensor(b!) out, int metadata, int layer_index) -> ()"
)
_library = torch.library.Library("pagedray", "DEF")
# Global because an op can pass a number, but no object.
_alive: WeakValueDictionary[int, OpTarget] = WeakValueDictionary()
_handles = count()


def handle_of(target: OpTarget) -> int:
    """Return a number that identifies an object as long as it lives; call it once for each."""
    handle = next(_handles)
    _alive[handle] = target
    return handle


def define_op(name: str) -> AttentionOp:
    """Return the op `pagedray::name`, newly registered."""
    _library.define(name + _SCHEMA)
    # All devices share one implementation; the schema declares the mutated tensors.
    _library.impl(name, _run, "CUDA")
    _library.impl(name, _run, "CPU")
    _library.impl(name, _run_fake, "Meta")
    op: AttentionOp = getattr(torch.ops.pagedray, name).default
    return op


def _run(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    sinks: torch.Tensor | None,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    metadata: int,
    layer_index: int,
) -> None:
    inputs = AttentionInputs(query, key, value, sinks=sinks)
    _alive[metadata].attend(layer_index, inputs, kv_cache, out)


def _run_fake(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    sinks: torch.Tensor | None,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    metadata: int,
    layer_index: int,
) -> None:
    """Return without computing: meta tensors have no data."""
