"""Drafters on ranks, and draft heads: one decoder layer that reads hidden states of the target.

Input i is the token at position i + 1 and the state at position i: first that of the target, then
the output of the layer itself. The output predicts the token at position i + 2. Heads of EAGLE-3
project the residual stream at several layers of the target; layers of multi-token prediction (MTP)
read its last hidden state.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from pagedray.errors import CheckpointError
from workers.layers.embedding import ParallelHead, VocabEmbedding
from workers.layers.linear import RowParallelLinear
from workers.layers.norm import RMSNorm
from workers.layers.rope import NoRotation, RotaryEmbedding, Rotation
from workers.layers.weight import CompositeLayer, Layer, Placement, WeightShard, part_of
from workers.models.decoder_layer import make_mlp, make_norm
from workers.models.fused_norm import FusedNorm
from workers.models.self_attention import DecoderSelfAttention
from workers.parallel.group import SoloGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pagedray.model_config import DraftHeadConfig, ModelConfig
    from workers.layers.norm import Norm
    from workers.layers.sharded_logits import ShardedLogits
    from workers.models.self_attention import StepAttention

__all__ = [
    "DraftHead",
    "DraftOutputs",
    "Eagle3Head",
    "HeadRows",
    "MtpHead",
    "RankDrafter",
    "Taps",
]


class Taps:
    """The residual stream at the inputs of some layers of the target, of one step."""

    def __init__(
        self,
        layers: tuple[int, ...],
        *,
        max_num_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = layers
        self._places = {
            layer: [place for place, other in enumerate(layers) if other == layer]
            for layer in layers
        }
        size = len(layers), hidden_size
        self._states = torch.zeros(max_num_tokens, *size, dtype=dtype, device=device)

    def keep(self, layer: int, stream: torch.Tensor) -> None:
        """Keep the input of a layer, `[num_tokens, hidden_size]`, if the layer is tapped."""
        for place in self._places.get(layer, ()):
            self._states[: len(stream), place].copy_(stream)

    def of_step(self, num_tokens: int) -> torch.Tensor:
        """Return the kept inputs, `[num_tokens, num_layers * hidden_size]`."""
        return self._states[:num_tokens].flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class HeadRows:
    """Inputs of the layer of a head."""

    normed: torch.Tensor
    """The input of the attention, `[num_rows, input_size]`."""
    residual: torch.Tensor
    """`[num_rows, hidden_size]`, to which the layer adds."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftOutputs:
    """Outputs of a pass of a drafter."""

    normed: torch.Tensor
    """Behind the last norm, `[num_rows, hidden_size]`; the logits are products with it."""
    states: torch.Tensor | None
    """The states of the next pass, of the same shape; a draft model has none."""


class RankDrafter(CompositeLayer):
    """One rank's part of a drafter. Call `load_weights` before the first forward."""

    lag: ClassVar[int]
    """How many positions before its own a token is read: 1 by a draft head, 0 by a draft model."""

    layers: ModelConfig
    """The layers, as a model with the checkpoint of the drafter."""
    vocab_size: int
    """The size of the vocabulary of the target."""
    token_ids: torch.Tensor
    """The tokens of the target that the logits are of, `[draft_vocab_size]` int64."""

    @abstractmethod
    def read(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor | None:
        """Write keys and values of all tokens of a step; return their states, as `run` takes them.

        Behind a step of the target. The tokens are read at `positions`, as in `run`.
        """

    @abstractmethod
    def run(
        self,
        token_ids: torch.Tensor,
        states: torch.Tensor | None,
        positions: torch.Tensor,
        attention: StepAttention,
    ) -> DraftOutputs:
        """Return the outputs of one token of each row, which predict the next token.

        `token_ids` and `positions` are `[num_rows]` int64; a token is read at the position `lag`
        before its own. `states` come from `read` for these positions, or from the pass before.
        """

    @abstractmethod
    def logits(self, outputs: DraftOutputs) -> ShardedLogits:
        """Return the logits of `token_ids`."""


class _FusedNorms(NamedTuple):
    """The norms of a head, by the kernels of their weights."""

    token: FusedNorm
    state: FusedNorm
    mlp: FusedNorm
    last: FusedNorm


class _TokenMap(Layer):
    """The token of the target for each token of a head, as a checkpoint stores it."""

    def __init__(self, config: DraftHeadConfig, place: Placement) -> None:
        self._config = config
        size = config.draft_vocab_size
        self.token_ids = torch.arange(size, device=place.device)
        """`[draft_vocab_size]` int64, written in place when weights are loaded."""
        self._offsets = torch.zeros(size, dtype=torch.int64, device=place.device)

    def weight_shards(self) -> Iterator[WeightShard]:
        if self._config.has_token_map:
            size = len(self._offsets)
            yield WeightShard(
                name="d2t", shape=(size,), part=(slice(None),), target=self._offsets, dummy=0.0
            )

    def finalize(self) -> None:
        token_ids = self.token_ids + self._offsets
        vocab_size = self._config.layer.vocab_size
        least, most = int(token_ids.min()), int(token_ids.max())
        if least < 0 or most >= vocab_size:
            raise CheckpointError(
                f"{self._config.layer.folder}: tensor d2t maps to tokens {least} to {most}, but "
                f"the vocabulary has {vocab_size} tokens."
            )
        self.token_ids.copy_(token_ids)


class DraftHead(RankDrafter):
    """One rank's part of a head."""

    lag = 1

    def __init__(
        self,
        config: DraftHeadConfig,
        place: Placement,
        *,
        embedding: VocabEmbedding,
        taps: Taps,
        norms: tuple[Norm, Norm, Norm],
        input_size: int | None = None,
    ) -> None:
        """`embedding` and `taps` belong to the target.

        `norms` are the norm of embeddings, the norm of states and the last norm. `input_size` is
        the size of the rows that the attention reads, by default the hidden size.
        """
        layer = config.layer
        prefix = layer.names.decoder_layer.format(0)
        self.config = config
        self.layers, self.vocab_size = layer, layer.vocab_size
        self._taps = taps
        self._group = place.group
        self._embedding = embedding
        self._token_norm, self._state_norm, self._norm = norms
        self._attention = DecoderSelfAttention(prefix, layer, 0, place, input_size=input_size)
        self._mlp_norm = make_norm(f"{prefix}.{layer.names.mlp_norm}", layer, place)
        self._mlp = make_mlp(prefix, layer, 0, place)
        self._fused_norms: _FusedNorms
        rope = layer.rope_of(0)
        self._rotary = None
        if rope is not None:
            self._rotary = RotaryEmbedding(
                rope,
                head_size=layer.head_size,
                num_query_heads=self._attention.layer.params.num_heads,
                max_positions=layer.max_positions,
                dtype=place.dtype,
                device=place.device,
            )

    @abstractmethod
    def first_states(self, taps: torch.Tensor) -> torch.Tensor:
        """Return the states, `[num_tokens, hidden_size]`, of `Taps.of_step`."""

    @abstractmethod
    def rows(self, token_ids: torch.Tensor, states: torch.Tensor) -> HeadRows:
        """Return the inputs of the layer, given the next tokens, `[num_tokens]` int64."""

    def read(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        states = self.first_states(self._taps.of_step(len(token_ids)))
        self._attend(self.rows(token_ids, states), positions, attention)
        return states

    def run(
        self,
        token_ids: torch.Tensor,
        states: torch.Tensor | None,
        positions: torch.Tensor,
        attention: StepAttention,
    ) -> DraftOutputs:
        assert states is not None
        rows, norms = self.rows(token_ids, states), self._fused_norms
        attended = self._attend(rows, positions, attention)
        stream = rows.residual
        inner = norms.mlp(stream, self._attention.output.kernel(attended))
        normed = norms.last(stream, self._mlp.partial(inner))
        return DraftOutputs(normed, normed if self.config.norms_output else stream)

    def finalize(self) -> None:
        super().finalize()
        self._fused_norms = _FusedNorms(
            FusedNorm(self._token_norm),
            FusedNorm(self._state_norm),
            FusedNorm(self._mlp_norm, sums_over=self._group),
            FusedNorm(self._norm, sums_over=self._group),
        )

    def sublayers(self) -> Iterator[Layer]:
        yield from (self._token_norm, self._state_norm, self._attention, self._mlp_norm)
        yield from (self._mlp, self._norm)

    def _attend(
        self, rows: HeadRows, positions: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        """Return the attention of this rank's heads, `[num_rows, num_heads * head_size]`."""
        rotation: Rotation = NoRotation()
        if self._rotary is not None:
            rotation = self._rotary.rotation_at(positions)
        return self._attention.attend(self._attention.qkv(rows.normed), rotation, attention)

    def _part(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the inputs of a product that sums over ranks."""
        return rows[:, part_of(rows.shape[1], self._group)].contiguous()


class Eagle3Head(DraftHead):
    """One rank's part of a head of EAGLE-3."""

    def __init__(
        self,
        config: DraftHeadConfig,
        place: Placement,
        *,
        embedding: VocabEmbedding,
        taps: Taps,
    ) -> None:
        """As for `DraftHead`."""
        layer = config.layer
        size, eps, prefix = layer.hidden_size, layer.norm_eps, layer.names.decoder_layer.format(0)
        num_taps = len(config.tapped_layers)

        def norm(name: str, norm_size: int = size) -> RMSNorm:
            return RMSNorm(name, norm_size, eps, place)

        self._own_embedding: VocabEmbedding | None = None
        if config.has_embedding:
            name, alone = layer.names.embedding, replace(place, group=SoloGroup())
            self._own_embedding = VocabEmbedding(name, layer.vocab_size, size, alone)
        super().__init__(
            config,
            place,
            embedding=self._own_embedding or embedding,
            taps=taps,
            norms=(
                norm(f"{prefix}.input_layernorm"),
                norm(f"{prefix}.hidden_norm"),
                norm(layer.names.final_norm),
            ),
            input_size=2 * size,
        )
        self._all_taps_norm: RMSNorm | None = None
        self._tap_norms = [norm(f"fc_norm.{i}") for i in range(num_taps) if config.norms_each_tap]
        if config.norms_all_taps:
            self._all_taps_norm = norm("input_norm", num_taps * size)
        self._projection = RowParallelLinear("fc", num_taps * size, size, place, has_bias=False)
        self._logits = ParallelHead("lm_head", config.draft_vocab_size, size, place, tied_to=None)
        self._token_map = _TokenMap(config, place)
        self.token_ids = self._token_map.token_ids

    def first_states(self, taps: torch.Tensor) -> torch.Tensor:
        if self._tap_norms:
            parts = taps.chunk(len(self._tap_norms), dim=1)
            pairs = zip(self._tap_norms, parts, strict=True)
            taps = torch.cat([norm(part.contiguous()) for norm, part in pairs], dim=1)
        if self._all_taps_norm is not None:
            taps = self._all_taps_norm(taps)
        return self._projection(self._part(taps))

    def rows(self, token_ids: torch.Tensor, states: torch.Tensor) -> HeadRows:
        normed = self._fused_norms.state(states)
        embedded = self._fused_norms.token(self._embedding(token_ids))
        residual = normed if self.config.norms_residual else states
        return HeadRows(torch.cat((embedded, normed), dim=1), residual)

    def logits(self, outputs: DraftOutputs) -> ShardedLogits:
        return self._logits(outputs.normed)

    def sublayers(self) -> Iterator[Layer]:
        yield from super().sublayers()
        yield from self._tap_norms
        if self._all_taps_norm is not None:
            yield self._all_taps_norm
        yield self._projection
        if self._own_embedding is not None:
            yield self._own_embedding
        yield from (self._logits, self._token_map)


class MtpHead(DraftHead):
    """One rank's part of an MTP layer, with the embedding and the output head of its target."""

    def __init__(
        self,
        config: DraftHeadConfig,
        place: Placement,
        *,
        embedding: VocabEmbedding,
        taps: Taps,
        target_norm: Norm,
        target_logits: Callable[[torch.Tensor], ShardedLogits],
    ) -> None:
        """As for `DraftHead`; `target_norm` is the last norm of the target."""
        layer, mtp = config.layer, config.mtp
        assert mtp is not None
        names = mtp.token_norm, mtp.state_norm, mtp.last_norm
        token_norm, state_norm, last_norm = (make_norm(name, layer, place) for name in names)
        super().__init__(
            config,
            place,
            embedding=embedding,
            taps=taps,
            norms=(token_norm, state_norm, last_norm),
        )
        size, prefix = layer.hidden_size, layer.names.decoder_layer.format(0)
        self._mtp = mtp
        self._target_norm = target_norm
        self._target_logits = target_logits
        self._projection = RowParallelLinear(mtp.projection, 2 * size, size, place, has_bias=False)
        self._input_norm = make_norm(f"{prefix}.{layer.names.attention_norm}", layer, place)
        self.token_ids = torch.arange(config.draft_vocab_size, device=place.device)

    def first_states(self, taps: torch.Tensor) -> torch.Tensor:
        return self._target_norm(taps) if self._mtp.reads_normed else taps

    def rows(self, token_ids: torch.Tensor, states: torch.Tensor) -> HeadRows:
        norms = self._fused_norms
        pair = [norms.token(self._embedding(token_ids)), norms.state(states)]
        if self._mtp.puts_state_first:
            pair.reverse()
        residual = self._projection(self._part(torch.cat(pair, dim=1)))
        return HeadRows(self._input_norm(residual), residual)

    def logits(self, outputs: DraftOutputs) -> ShardedLogits:
        return self._target_logits(outputs.normed)

    def sublayers(self) -> Iterator[Layer]:
        yield from super().sublayers()
        yield from (self._projection, self._input_norm)
