"""What the torch_sdpa backend keeps between steps: staging, scratch and views of the cache.

Large tensors are never allocated per step: glibc hands each of them out as fresh pages, and the
page faults cost more than the attention.
"""

import weakref
from typing import Any, NamedTuple

import numpy.typing as npt
import torch

from attention.params import AttentionSpec, storage_dtype

__all__ = ["CacheViews", "LayerRows", "Scratch", "Staging"]

# Elements; keeps every array that is handed out aligned for any kernel.
_ALIGNMENT = 16

# An array of the dtype that its Staging was made for.
_Array = npt.NDArray[Any]


class _Chunk:
    """A host array and its twin on the device; one memory if the device is the CPU."""

    def __init__(self, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        on_cpu = device.type == "cpu"
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self._host = torch.empty(capacity, dtype=dtype, pin_memory=not on_cpu)
            self._twin = self._host if on_cpu else torch.empty_like(self._host, device=device)
        self._array: _Array = self._host.numpy()
        self.capacity = capacity
        self.used = 0

    def take(self, size: int) -> tuple[_Array, torch.Tensor]:
        start = self.used
        self.used = start + -(-size // _ALIGNMENT) * _ALIGNMENT
        return self._array[start : start + size], self._twin[start : start + size]

    def upload(self) -> None:
        if self._twin is not self._host:
            self._twin[: self.used].copy_(self._host[: self.used], non_blocking=True)


class Staging:
    """Arrays that the host fills each step and kernels read; no allocation once warm."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        # On a GPU the copy of the last step may still be reading its side, so there are two.
        num_sides = 1 if device.type == "cpu" else 2
        self._sides = [[_Chunk(4096, dtype, device)] for _ in range(num_sides)]
        self._copied: list[torch.cuda.Event | None] = [None] * num_sides
        self._side = 0

    def reset(self) -> None:
        """Take back every array that was handed out before the last reset."""
        self._side = (self._side + 1) % len(self._sides)
        copied = self._copied[self._side]
        if copied is not None:
            copied.synchronize()
        chunks = self._sides[self._side]
        if len(chunks) > 1:
            capacity = sum(chunk.capacity for chunk in chunks)
            chunks[:] = [_Chunk(capacity, self._dtype, self._device)]
        chunks[0].used = 0

    def take(self, *shape: int) -> tuple[_Array, torch.Tensor]:
        """Return an array to fill, and the tensor that shows its content after `upload`."""
        size = 1
        for length in shape:
            size *= length
        chunks = self._sides[self._side]
        last = chunks[-1]
        if last.used + size > last.capacity - _ALIGNMENT:
            last = _Chunk(2 * last.capacity + size, self._dtype, self._device)
            chunks.append(last)
        array, tensor = last.take(size)
        return (array, tensor) if len(shape) == 1 else (array.reshape(shape), tensor.view(shape))

    def upload(self) -> None:
        """Bring what was filled to the device, in the order of its current stream."""
        if self._device.type == "cpu":
            return
        for chunk in self._sides[self._side]:
            chunk.upload()
        event = self._copied[self._side] or torch.cuda.Event()
        event.record()
        self._copied[self._side] = event


class Scratch:
    """One tensor that every gather reuses, so that it stays in the CPU's cache."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._flat = torch.empty(0, dtype=dtype, device=device)

    def take(self, size: int) -> torch.Tensor:
        """Return the first `size` elements; whoever took them before has them too."""
        if self._flat.numel() < size:
            with torch.inference_mode(False):
                self._flat = self._flat.new_empty(1 << (size - 1).bit_length())
        return self._flat[:size]


class LayerRows(NamedTuple):
    """One layer's cache as rows, shifted so that equal indices serve all layers."""

    blocks: torch.Tensor
    """Row `2 * num_cache_layers * b` holds the keys of block `b`, the row after it the values."""
    keys: torch.Tensor
    """Row `2 * num_cache_layers * block_size * b + i` is the key of slot `i` of block `b`."""
    values: torch.Tensor
    """As `keys`."""


class CacheViews:
    """Rows of every place on the layer axis of the cache that was used last."""

    def __init__(self, spec: AttentionSpec) -> None:
        params = spec.layers[0]
        self._dtype = storage_dtype(spec.cache_dtype)
        self._shape = (
            spec.num_cache_layers,
            2,
            spec.block_size,
            params.num_kv_heads,
            params.head_size,
        )
        self._layers: list[LayerRows] = []
        self._owner: weakref.ref[torch.Tensor] | None = None

    def of(self, kv_cache: torch.Tensor) -> list[LayerRows]:
        """Return the rows of each place; they live no longer than the tensor they are of."""
        if self._owner is None or self._owner() is not kv_cache:
            self._layers = self._rows(kv_cache)
            self._owner = weakref.ref(kv_cache, self._forget)
        return self._layers

    def _forget(self, _: object) -> None:
        self._layers = []
        self._owner = None

    def _rows(self, kv_cache: torch.Tensor) -> list[LayerRows]:
        if tuple(kv_cache.shape[1:]) != self._shape or kv_cache.dtype != self._dtype:
            raise ValueError(
                f"The cache is {tuple(kv_cache.shape)} {kv_cache.dtype}, "
                f"but must be (num_blocks, {', '.join(map(str, self._shape))}) {self._dtype}."
            )
        num_layers, _, block_size, num_kv_heads, head_size = self._shape
        slot_size = num_kv_heads * head_size
        # Views of `data` share its storage but do not keep the owner's tensor object alive.
        blocks = kv_cache.data.view(-1, block_size * slot_size)
        slots = kv_cache.data.view(-1, slot_size)
        return [
            LayerRows(
                blocks=blocks[2 * layer :],
                keys=slots[2 * layer * block_size :],
                values=slots[(2 * layer + 1) * block_size :],
            )
            for layer in range(num_layers)
        ]
