"""One rank of a model that embeds or scores: its part of the model and its steps.

It has no KV cache.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from attention.abstract import AttentionBatch, AttentionMetadata, AttentionMetadataBuilder
from pagedray.batch import Pooling, StepMasks, StepOutput, StepPlan, TextBatch
from pagedray.config import CacheSize, EngineConfig, KernelReport, StepLimits
from pagedray.rank_progress import Phase
from workers.decoder_worker import DecoderWorker
from workers.layers.linear_choice import replaced_kernels
from workers.layers.weight import Layer, WeightShard
from workers.models.bert import Bert, encoder_spec
from workers.models.decoder import Decoder
from workers.models.self_attention import attention_spec
from workers.weights.load_weights import load_weights, with_stored_experts, with_stored_head
from workers.worker import Worker, release_gpu_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt
    from numpy.typing import NDArray

    from pagedray.model_config import DenseModule
    from pagedray.node_memory import MemoryAddress
    from workers.parallel.group import ParallelGroup

__all__ = ["EmbeddingWorker", "make_worker", "pooled", "text_positions"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingVectors:
    """A step that was launched; the device may still compute its vectors."""

    step: int
    vectors: torch.Tensor
    """`[num_texts, vector_size]` float32, on the device."""

    @property
    def needs_masks(self) -> bool:
        return False

    def take_masks(self, masks: StepMasks) -> None:
        raise AssertionError

    @property
    def is_ready(self) -> bool:
        # `output` only waits for the device.
        return True

    @property
    def is_copied(self) -> bool:
        return True

    def output(self) -> StepOutput:
        return StepOutput(self.step, [], vectors=self.vectors.cpu().numpy().tobytes())


class EmbeddingWorker(Worker):
    """One rank of a model that embeds or scores texts."""

    def __init__(
        self, config: EngineConfig, group: ParallelGroup, device: torch.device | None = None
    ) -> None:
        if config.model.task == "score":
            # The answers of a reranker are rows of the head, which its embedding may be, too.
            config = with_stored_head(config)
        config = with_stored_experts(config)
        super().__init__(config, group, device)
        kind = Bert if config.model.is_encoder else Decoder
        spec_of = encoder_spec if config.model.is_encoder else attention_spec
        spec = spec_of(config.model, group, block_size=config.cache.block_size, device=self._device)
        self._backend = self._select_backend(spec)
        self._model: Bert | Decoder | None = kind(
            config.model, group, backend=self._backend, device=self._device
        )
        self._dense = [Dense(module, self._device) for module in config.model.dense_modules]
        if isinstance(self._model, Decoder):
            # A longer text has a step of its own.
            most = max(config.max_num_batched_tokens, config.max_model_len)
            self._model.prepare_steps(most)
        self._builder: AttentionMetadataBuilder | None = self._backend.make_metadata_builder(spec)

    def load_weights(self, report_progress: Callable[[int, int], None]) -> dict[str, str]:
        assert self._model is not None
        digests = load_weights(self._model, self._config, report_progress)
        for dense in self._dense:
            model = self._config.model
            own = replace(model, folder=model.folder / dense.folder, text_tensors=None)
            files = load_weights(dense, replace(self._config, model=own))
            digests |= {f"{dense.folder}/{name}": digest for name, digest in files.items()}
        return digests

    def available_cache(self, limits: StepLimits) -> CacheSize:
        return CacheSize(num_blocks=0, num_cpu_blocks=0, block_bytes=0, limits=limits)

    def allocate_cache(self, num_blocks: int, num_cpu_blocks: int) -> KernelReport:
        assert num_blocks == num_cpu_blocks == 0
        assert self._builder is not None
        report = KernelReport(
            self._backend.get_name(), self._builder.providers(), replaced_kernels(self._device)
        )
        if self._group.rank == 0:
            # The layers are the same on all ranks.
            logger.info("Attention: %s", report.attention)
            for sentence in self._builder.provider_sentences():
                logger.info("Attention: %s", sentence)
        return report

    def warm_up(self) -> None:
        pass

    def capture_graphs(self, *, only_largest: bool = False) -> None:
        pass

    def end_epoch(self) -> None:
        if self._device.type == "cuda":
            # Raises if the device has failed; without graphs nothing holds the collectives.
            torch.cuda.synchronize(self._device)
        self._group.leave()

    def launch(self, plan: StepPlan) -> PendingVectors:
        texts = plan.texts
        assert texts is not None
        assert self._model is not None
        assert self._builder is not None
        self._group.progress.enter(Phase.PREPARING)
        lengths = np.array([len(ids) for ids in texts.token_ids], dtype=np.int32)
        num_tokens = int(lengths.sum())
        batch = AttentionBatch(
            num_prefills=len(lengths),
            query_lens=lengths,
            seq_lens=lengths,
            block_tables=np.zeros((len(lengths), 1), dtype=np.int32),
            slot_mapping=np.full(num_tokens, -1, dtype=np.int64),
        )
        flat = np.concatenate([np.array(ids, dtype=np.int64) for ids in texts.token_ids])
        padding_id = self._config.model.position_padding_id
        positions = text_positions(flat, lengths, padding_id=padding_id)
        with torch.inference_mode():
            hidden = self._hidden(
                torch.from_numpy(flat).to(self._device),
                torch.from_numpy(positions).to(self._device),
                self._builder.build(batch),
                _token_types(texts, lengths),
            )
            self._group.progress.enter(Phase.SAMPLING)
            vectors = pooled(
                hidden,
                torch.from_numpy(lengths.astype(np.int64)).to(self._device),
                texts.pooling,
                normalize=texts.is_normalized and not self._dense,
            )
            for dense in self._dense:
                vectors = dense(vectors)
            if self._dense and texts.is_normalized:
                vectors = functional.normalize(vectors, dim=1)
            if self._config.model.task == "score":
                vectors = self._model.scores(vectors)
        return PendingVectors(step=plan.step, vectors=vectors)

    def _hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        token_types: torch.Tensor | None,
    ) -> torch.Tensor:
        assert self._model is not None
        if isinstance(self._model, Decoder) or token_types is None:
            return self._model.encode_texts(token_ids, positions, metadata)
        return self._model.encode_texts(
            token_ids, positions, metadata, token_types.to(self._device)
        )

    def close(self) -> None:
        self._model = self._builder = None
        if self._device.type == "cuda":
            release_gpu_memory()
        self._group.close()


def _token_types(texts: TextBatch, lengths: npt.NDArray[np.int32]) -> torch.Tensor | None:
    """Return the type of each token, `[num_tokens]` int64; None if all are of type 0."""
    if not texts.num_first_type:
        return None
    pairs = np.stack([texts.num_first_type, lengths - texts.num_first_type], axis=1)
    types = np.tile(np.array([0, 1], dtype=np.int64), len(lengths))
    return torch.from_numpy(np.repeat(types, pairs.ravel()))


def pooled(
    hidden: torch.Tensor, lengths: torch.Tensor, pooling: Pooling, *, normalize: bool
) -> torch.Tensor:
    """Return `[num_sequences, hidden_size]` float32.

    `hidden` is `[num_tokens, hidden_size]`, the sequences one after another and padding after
    them. `lengths` is `[num_sequences]` int64, each at least 1. `mean` averages all tokens, `cls`
    takes the first and `last` the last. Normalized vectors have an L2 norm of 1.
    """
    stops = lengths.cumsum(0)
    if pooling == "cls":
        vectors = hidden.index_select(0, stops - lengths).float()
    elif pooling == "last":
        vectors = hidden.index_select(0, stops - 1).float()
    else:
        # In float32, since a long sum in bfloat16 loses most of its terms.
        vectors = torch.segment_reduce(
            hidden[: int(lengths.sum())].float(), "mean", lengths=lengths, axis=0, unsafe=True
        )
    return functional.normalize(vectors, dim=1) if normalize else vectors


class Dense(Layer):
    """A linear layer for pooled vectors, in float32; every rank holds all of it."""

    def __init__(self, module: DenseModule, device: torch.device) -> None:
        self.folder = module.folder
        """The name of the folder that has its weights."""
        self._weight = torch.empty(module.out_size, module.in_size, device=device)
        self._bias = torch.empty(module.out_size, device=device) if module.has_bias else None
        self._has_tanh = module.activation == "tanh"

    def __call__(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return `[num_sequences, out_size]` float32 for `[num_sequences, in_size]` float32."""
        output = functional.linear(vectors, self._weight, self._bias)
        return output.tanh_() if self._has_tanh else output

    def weight_shards(self) -> Iterator[WeightShard]:
        for name, target in (("linear.weight", self._weight), ("linear.bias", self._bias)):
            if target is not None:
                part = (slice(None),) * target.dim()
                yield WeightShard(name=name, shape=tuple(target.shape), part=part, target=target)


def make_worker(
    config: EngineConfig,
    group: ParallelGroup,
    device: torch.device | None = None,
    pool_address: MemoryAddress | None = None,
) -> Worker:
    """Return the worker of one rank. Raises StartupError."""
    if config.model.pools:
        return EmbeddingWorker(config, group, device)
    return DecoderWorker(config, group, device, pool_address)


def text_positions(
    token_ids: NDArray[np.int64], lengths: NDArray[np.int32], *, padding_id: int | None = None
) -> NDArray[np.int64]:
    """Return the position of each token in its own text, `[num_tokens]`.

    `token_ids` is `[num_tokens]`, the texts one after another; `lengths` is `[num_texts]`. Without
    a `padding_id` positions count from 0. With a `padding_id` they follow RoBERTa (Liu et al.
    2019): they count from `padding_id + 1`, and padding tokens, which are not counted, have
    position `padding_id`.
    """
    starts = np.cumsum(lengths) - lengths
    if padding_id is None:
        return np.arange(len(token_ids)) - np.repeat(starts, lengths)
    is_text = token_ids != padding_id
    counts = np.cumsum(is_text)
    counted_before = (counts - is_text)[starts]
    within = counts - np.repeat(counted_before, lengths)
    return np.where(is_text, padding_id + within, padding_id)
