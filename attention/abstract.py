"""The interface between the engine and an attention backend.

Defines parameters of a layer, host data of a step, metadata, state. Does not know how any backend
computes. Metadata is always an argument; nothing here is a global.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from attention import cache
from attention.batch import AttentionBatch, EncoderBatch
from attention.kernels.arguments import Rotary
from attention.params import AttentionParams, AttentionSpec, AttentionType, StateTensor, problems_of

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "AttentionImpl",
    "AttentionInputs",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionParams",
    "AttentionSpec",
    "AttentionState",
    "AttentionType",
    "EagerAttentionState",
    "EncoderBatch",
    "StateTensor",
]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionInputs:
    """The queries, keys and values of one layer, for all tokens of a step.

    Tokens may be strided. Keys and values are None for cross attention if the step computes none.
    """

    query: torch.Tensor
    """`[num_tokens, num_heads, head_size]`."""
    key: torch.Tensor | None
    """`[num_tokens, num_kv_heads, head_size]`, and so is `value`."""
    value: torch.Tensor | None
    sinks: torch.Tensor | None = None
    """`[num_heads]` float32, the score of each sink, for layers with sinks."""
    rotary: Rotary | None = None
    """Rotates queries, in place, and keys first; only if the metadata `rotates_layer`."""
    is_cached: bool = False
    """Whether keys and values are in the cache already; then padding may follow the tokens."""

    def rows(self, tokens: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the queries, keys and values of some tokens; the step must have keys."""
        assert self.key is not None
        assert self.value is not None
        return self.query[tokens], self.key[tokens], self.value[tokens]


class AttentionMetadata(ABC):
    """State shared by all layers of one forward pass; valid until the builder's next build."""

    def __init__(self, batch: AttentionBatch) -> None:
        self._batch = batch

    @property
    def batch(self) -> AttentionBatch:
        """Return the host data that this was built from."""
        return self._batch

    @property
    def num_prefills(self) -> int:
        """Return the number of prefill sequences."""
        return self._batch.num_prefills

    @property
    def num_prefill_tokens(self) -> int:
        """Return the number of tokens of all prefills."""
        return self._batch.num_prefill_tokens

    @property
    def num_decode_tokens(self) -> int:
        """Return the number of decode tokens, which is that of decode sequences."""
        return self._batch.num_decodes

    @property
    def slot_mapping(self) -> npt.NDArray[np.int64]:
        """Return the slot of each token, `[num_tokens]` on the host, -1 if it is not written."""
        return self._batch.slot_mapping

    def asdict_zerocopy(self, skip_fields: Collection[str] = ()) -> dict[str, Any]:  # Any: mixed
        """Return the batch's fields by name, not copied; `make_metadata` takes them back."""
        names = [field.name for field in fields(AttentionBatch)]
        return {name: getattr(self._batch, name) for name in names if name not in skip_fields}

    @property
    @abstractmethod
    def prefill_metadata(self) -> "AttentionMetadata | None":
        """Return metadata of the prefills alone, or None if there are none."""

    @property
    @abstractmethod
    def decode_metadata(self) -> "AttentionMetadata | None":
        """Return metadata of the decodes and the padding, or None if there are no decodes."""

    @abstractmethod
    def advance_step(self) -> "AttentionMetadata":
        """Return the metadata of the next decode-only step; this metadata becomes invalid."""

    @property
    def device_slot_mappings(self) -> tuple[torch.Tensor, ...]:
        """Return the slots of each group on the device; valid until the next step is prepared."""
        raise _no_capture(self)

    def rotates_layer(self, layer_index: int) -> bool:
        """Return whether `attend` takes inputs of this layer with `rotary`, in this step."""
        return False

    @abstractmethod
    def write(
        self, layer_index: int, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor
    ) -> None:
        """Write a layer's keys and values, `[num_tokens, num_kv_heads, head_size]`, to the cache.

        Nothing attends.
        """

    @abstractmethod
    def attend(
        self, layer_index: int, inputs: AttentionInputs, kv_cache: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Write a layer's keys and values to the cache, and attend. Nothing is checked.

        `kv_cache` is the cache of all layers, or empty if all sequences are whole prompts. `out` is
        `[num_tokens, num_heads, head_size]`, contiguous.
        """


class AttentionMetadataBuilder(ABC):
    """Builds the metadata of each step in buffers that it reuses."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec

    @property
    def spec(self) -> AttentionSpec:
        """Return the spec of the steps that this builder plans."""
        return self._spec

    @abstractmethod
    def build(self, batch: AttentionBatch) -> AttentionMetadata:
        """Return the metadata of one step; the one built before is no longer valid."""

    @abstractmethod
    def providers(self) -> dict[str, dict[str, int]]:
        """Return how many layers each provider of kernels computes, by part of a step."""

    @property
    def takes_excess(self) -> bool:
        """Whether batches of decodes may have an excess."""
        return False

    def write_layer(
        self,
        layer_index: int,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write a layer's keys and values to the cache; can be captured.

        `slot_mapping` is on the device, int64 `[num_tokens]`, -1 for tokens that are not written.
        """
        raise _no_capture(self)

    def provider_sentences(self) -> list[str]:
        """Return a sentence for each part of a step and provider, for the log."""
        return [
            f"{provider} kernels compute {part} of {count} layers."
            for part, counts in self.providers().items()
            for provider, count in counts.items()
        ]


class AttentionState(ABC):
    """State that a worker keeps between steps, such as the buffers of captured graphs."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec

    @contextmanager
    def graph_capture(self, max_batch_size: int) -> Iterator[None]:
        """Hold the buffers that graphs up to this size share, and release them after errors too."""
        try:
            self._allocate_capture_buffers(max_batch_size)
            yield
        finally:
            self._release_capture_buffers()

    @abstractmethod
    def _allocate_capture_buffers(self, max_batch_size: int) -> None:
        """Allocate the buffers of `graph_capture`."""

    @abstractmethod
    def _release_capture_buffers(self) -> None:
        """Release the buffers, also if only a part of them was allocated."""

    @abstractmethod
    def graph_capture_get_metadata_for_batch(self, batch_size: int) -> AttentionMetadata:
        """Return metadata of a decode-only batch for a capture; within `graph_capture`."""

    @abstractmethod
    def graph_clone(self, batch_size: int) -> "AttentionState":
        """Return the state to keep with the graph of this size; within `graph_capture`."""

    @abstractmethod
    def get_graph_input_buffers(self, metadata: AttentionMetadata) -> dict[str, torch.Tensor]:
        """Return the tensors that the captured graph reads, by name."""

    @abstractmethod
    def prepare_graph_input_buffers(
        self, input_buffers: Mapping[str, torch.Tensor], metadata: AttentionMetadata
    ) -> None:
        """Copy live metadata into a graph's input buffers before a replay."""

    @abstractmethod
    def begin_forward(self, metadata: AttentionMetadata) -> None:
        """Prepare a forward pass, eager or replayed."""


class EagerAttentionState(AttentionState):
    """The state of a backend that does not support graph capture."""

    def _allocate_capture_buffers(self, max_batch_size: int) -> None:
        raise _no_capture(self)

    def _release_capture_buffers(self) -> None:
        """Release nothing, since nothing is allocated."""

    def graph_capture_get_metadata_for_batch(self, batch_size: int) -> AttentionMetadata:
        raise _no_capture(self)

    def graph_clone(self, batch_size: int) -> AttentionState:
        raise _no_capture(self)

    def get_graph_input_buffers(self, metadata: AttentionMetadata) -> dict[str, torch.Tensor]:
        raise _no_capture(self)

    def prepare_graph_input_buffers(
        self, input_buffers: Mapping[str, torch.Tensor], metadata: AttentionMetadata
    ) -> None:
        raise _no_capture(self)

    def begin_forward(self, metadata: AttentionMetadata) -> None:
        """Return at once, since the builder has planned everything."""


class AttentionImpl(ABC):
    """The computation of one layer."""

    def __init__(
        self, params: AttentionParams, layer_index: int, sinks: torch.Tensor | None = None
    ) -> None:
        """`sinks` is `[num_heads]` float32, the score of each sink, if the layer has them."""
        assert params.has_sinks == (sinks is not None)
        self._params = params
        self._layer_index = layer_index
        self._sinks = sinks

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write keys and values to the cache, then attend; `[num_tokens, num_heads * head_size]`.

        `kv_cache` is the cache of all layers, or an empty tensor in a profile run, which writes
        nothing and attends to the tokens of the step only. Padding may hold any values, and its
        result is zero.

        Tokens are decoder tokens, or for ENCODER the tokens of `metadata.batch.encoder`. For
        ENCODER_DECODER, keys and values belong to the encoder tokens that the step computes; both
        are None without encoder tokens.
        """
        if out is None:
            out = query.new_empty(query.shape)
        by_head = (-1, self._params.head_size)
        inputs = AttentionInputs(
            query.unflatten(1, by_head),
            None if key is None else key.unflatten(1, by_head),
            None if value is None else value.unflatten(1, by_head),
            sinks=self._sinks,
        )
        self._attend(metadata, inputs, kv_cache, out.unflatten(1, by_head))
        return out

    @abstractmethod
    def _attend(
        self,
        metadata: AttentionMetadata,
        inputs: AttentionInputs,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Call `attend` of the metadata."""


class AttentionBackend(ABC):
    """A family of the classes above, as a static factory that is never instantiated.

    Defining a subclass that leaves a member abstract raises TypeError.
    """

    supports_graph_capture: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        names = AttentionBackend.__abstractmethods__
        missing = sorted(
            n for n in names if getattr(getattr(cls, n), "__isabstractmethod__", False)
        )
        if missing:
            raise TypeError(f"{cls.__name__} does not define {', '.join(missing)}.")

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """Return the name by which the selector knows this backend."""

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """Return the class of a layer's computation."""

    @staticmethod
    @abstractmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        """Return the class of a step's metadata."""

    @staticmethod
    @abstractmethod
    def get_state_cls() -> type[AttentionState]:
        """Return the class of a worker's state."""

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """Return the class that builds metadata."""

    @classmethod
    def make_metadata_builder(cls, spec: AttentionSpec) -> AttentionMetadataBuilder:
        """Return a builder; each worker keeps its builder."""
        return cls.get_builder_cls()(spec)

    @classmethod
    def make_metadata(
        cls, spec: AttentionSpec, **batch_fields: Any
    ) -> AttentionMetadata:  # Any: mixed
        """Return metadata with buffers of its own, from the fields of an `AttentionBatch`."""
        return cls.make_metadata_builder(spec).build(AttentionBatch(**batch_fields))

    @classmethod
    def check(cls, spec: AttentionSpec) -> tuple[str, ...]:
        """Return every reason why this backend rejects a configuration; empty if it does not."""
        return tuple(dict.fromkeys((*problems_of(spec), *cls._problems(spec))))

    @classmethod
    @abstractmethod
    def _problems(cls, spec: AttentionSpec) -> Iterable[str]:
        """Return the reasons of this backend alone; the spec may be invalid."""

    @staticmethod
    def get_kv_cache_shape(
        *, num_blocks: int, num_layers: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, int, int, int, int, int]:
        """Return the shape of the cache of all layers, which is the same for all backends."""
        return cache.kv_cache_shape(
            num_blocks=num_blocks,
            num_layers=num_layers,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
        )

    swap_blocks = staticmethod(cache.swap_blocks)
    copy_blocks = staticmethod(cache.copy_blocks)


def _no_capture(part: object) -> NotImplementedError:
    return NotImplementedError(f"{type(part).__name__} does not capture graphs.")
