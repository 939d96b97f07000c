"""The forward pass of a step, by graphs or eagerly.

It knows neither plans nor sampling.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from attention.abstract import (
    AttentionInputs,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionState,
)
from workers.layers.recurrent import StepStates
from workers.models.self_attention import CachedAttention, SelectedAttention

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from attention.layer import Attention
    from workers.layers.sharded_logits import ShardedLogits
    from workers.models.decoder import Decoder
    from workers.models.draft_head import RankDrafter
    from workers.runner.decode_graphs import ChainGraphs, DecodeGraphs
    from workers.runner.input_batch import StepInputs
    from workers.runner.piece_graphs import PieceGraphs
    from workers.runner.step_graphs import StepGraphs

__all__ = ["ForwardPass", "SampledAttention"]


class ForwardPass:
    """Runs a rank's part of the model on the inputs of steps."""

    def __init__(
        self,
        model: Decoder,
        kv_cache: torch.Tensor,
        *,
        builder: AttentionMetadataBuilder,
        state: AttentionState,
        decode_graphs: DecodeGraphs | None = None,
        chain_graphs: ChainGraphs | None = None,
        piece_graphs: PieceGraphs | None = None,
        sampled_attention: SampledAttention | None = None,
        states: tuple[tuple[torch.Tensor, ...], ...] = (),
    ) -> None:
        """A step that no graphs can replay runs eagerly, with `sampled_attention` if given.

        `states` are those of all rows, by recurrent layer.
        """
        self._model = model
        self._states = states
        self._kv_cache = kv_cache
        self._builder = builder
        self._state = state
        self._decode_graphs = decode_graphs
        self._chain_graphs = chain_graphs
        self._piece_graphs = piece_graphs
        self._sampled_attention = sampled_attention
        self._metadata: AttentionMetadata | None = None
        self._replayed: DecodeGraphs | None = None
        """The graphs of the latest step, if it had only decodes."""
        self._accept: Callable[[torch.Tensor], None] | None = None
        """What the last step left to `accept_drafts`, if it has kept states."""
        kinds = (decode_graphs, chain_graphs, piece_graphs)
        # Any: each kind has captures of its own.
        self._graphs: list[StepGraphs[Any]] = [one for one in kinds if one is not None]

    @property
    def attention_providers(self) -> dict[str, dict[str, int]]:
        """Layers that each provider of attention kernels serves, by part of a step."""
        return self._builder.providers()

    @property
    def attention_provider_sentences(self) -> list[str]:
        """Sentences that say which provider serves which layers, and why."""
        return self._builder.provider_sentences()

    @property
    def metadata(self) -> AttentionMetadata:
        """The metadata of the latest step, which must have tokens."""
        assert self._metadata is not None
        return self._metadata

    @property
    def takes_excess(self) -> bool:
        """Whether steps of decodes may have lengths that only the device knows."""
        return not self._states and self._builder.takes_excess

    def trace_graphs(self) -> None:
        """Capture all graphs, and drop the captures; nothing runs.

        All ranks of a group must do this at the same time.
        """
        for graphs in self._graphs:
            graphs.trace()

    def capture_graphs(self, *, only_largest: bool = False) -> None:
        """Capture all graphs. All ranks of a group must do this at the same time."""
        for graphs in self._graphs:
            graphs.capture_graphs(only_largest=only_largest)

    def capture_next(self) -> bool:
        """Capture the smallest of the missing graphs; return False if none is missing."""
        incomplete = [graphs for graphs in self._graphs if graphs.missing_sizes]
        if incomplete:
            min(incomplete, key=lambda graphs: graphs.missing_sizes[0]).capture_next()
        return bool(incomplete)

    def hidden_states(self, inputs: StepInputs) -> torch.Tensor:
        """Return the normed hidden states of `logits_indices`, `[num_logits, hidden_size]`."""
        self._metadata = metadata = self._builder.build(inputs.attention)
        self._replayed = None
        if self._chain_graphs is not None and self._chain_graphs.can_replay(inputs):
            self._accept = self._chain_graphs.accept
            self._replayed = self._chain_graphs
            return self._chain_graphs.replay(inputs, metadata)
        if self._decode_graphs is not None and self._decode_graphs.can_replay(inputs):
            self._replayed = self._decode_graphs
            return self._decode_graphs.replay(inputs, metadata)
        self._state.begin_forward(metadata)
        if self._piece_graphs is not None and self._piece_graphs.can_replay(inputs):
            return self._piece_graphs.replay(inputs, metadata)
        states = None if inputs.segments is None else StepStates(inputs.segments, self._states)
        if states is not None and inputs.has_kept_states:
            self._accept = partial(states.accept, inputs.token_ids)
        attention = CachedAttention(self._kv_cache, metadata, states)
        last = None
        if self._sampled_attention is not None:
            last = self._sampled_attention.of_step(inputs, metadata)
        return self._model.forward(
            inputs.token_ids, inputs.positions, attention, inputs.logits_indices, last
        )

    def read(self, drafter: RankDrafter, inputs: StepInputs) -> None:
        """Have a draft model read the tokens of the latest step, which has these inputs."""
        if self._replayed is not None:
            self._replayed.read()
            return
        attention = CachedAttention(self._kv_cache, self.metadata)
        drafter.read(inputs.token_ids, inputs.positions, attention)

    def accept_drafts(self, sampled_ids: torch.Tensor) -> None:
        """Advance the states that the last step has kept by the accepted tokens of its chains.

        `sampled_ids` are the sampled tokens, `[num_tokens]`.
        """
        accept, self._accept = self._accept, None
        assert accept is not None
        accept(sampled_ids)

    def logits(self, hidden: torch.Tensor) -> ShardedLogits:
        """Return the logits of hidden states."""
        return self._model.logits(hidden)


class SampledAttention:
    """Makes the attention of the last layer for the steps of a rank."""

    def __init__(
        self,
        kv_cache: torch.Tensor,
        builder: AttentionMetadataBuilder,
        sampled_builder: AttentionMetadataBuilder,
    ) -> None:
        """`builder` is that of the steps, and `sampled_builder` another one of the same backend."""
        self._kv_cache = kv_cache
        self._builder = builder
        self._sampled_builder = sampled_builder

    def of_step(self, inputs: StepInputs, metadata: AttentionMetadata) -> SelectedAttention | None:
        """Return the attention for the tokens of `logits_indices`; None if not all are sampled.

        `metadata` belongs to the step. The next call invalidates the result.
        """
        if inputs.sampled_sequences is None:
            return None
        assert inputs.logits_indices is not None
        decodes = inputs.attention.last_tokens(inputs.sampled_sequences)
        sampled = self._sampled_builder.build(decodes) if decodes.num_decodes else None
        groups = self._builder.spec.cache_groups

        def write(layer: Attention, key: torch.Tensor, value: torch.Tensor) -> None:
            index = layer.layer_index
            slots = metadata.device_slot_mappings[groups[index]]
            self._builder.write_layer(index, key, value, self._kv_cache, slots)

        return _SampledStep(self._kv_cache, inputs.logits_indices, sampled, write)


class _SampledStep(SelectedAttention):
    """Attends for the sampled tokens of a step, as decodes."""

    def __init__(
        self,
        kv_cache: torch.Tensor,
        indices: torch.Tensor,
        metadata: AttentionMetadata | None,
        write: Callable[[Attention, torch.Tensor, torch.Tensor], None],
    ) -> None:
        """`metadata` has the tokens of `indices` as decodes, and is None if there are none.

        `write` writes the keys and values of all tokens to the cache.
        """
        super().__init__(indices)
        self._kv_cache = kv_cache
        self._metadata = metadata
        self._write = write

    def attend_selected(
        self,
        layer: Attention,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
    ) -> torch.Tensor:
        if key is not None and value is not None:
            self._write(layer, key, value)
        out = query.new_empty(query.shape)
        if self._metadata is not None:
            inputs = AttentionInputs(query, key, value, sinks=layer.sinks, is_cached=True)
            self._metadata.attend(layer.layer_index, inputs, self._kv_cache, out)
        return out.flatten(1)
