"""The attention of the last layer for sampled tokens alone, against transformers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from attention.abstract import AttentionBatch
from attention.params import storage_dtype
from pagedray.config import EngineConfig
from tests.attention.shared_backend import SharedBackend
from tests.workers.reference import reference_logits, save_checkpoint, token_ids
from workers.layers import linear_choice
from workers.layers.linear_kernel import DenseLinear
from workers.models.decoder import Decoder
from workers.models.families.registry import read_model_config
from workers.models.fused_layers import LayerTail
from workers.models.fused_norm import Delta
from workers.models.self_attention import CachedAttention, attention_spec
from workers.parallel.group import ParallelGroup, SoloGroup
from workers.runner.forward_pass import SampledAttention
from workers.runner.input_batch import StepInputs
from workers.weights.load_weights import load_weights

BLOCK_SIZE = 4
BLOCKS_PER_SEQUENCE = 6
NUM_SEQUENCES = 4
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of a sequence; all sequences have the same text."""

    sequence: int
    first: int
    stop: int
    is_sampled: bool = True


class Rank:
    """One rank's part of a model, its cache and its steps."""

    def __init__(self, folder: Path, group: ParallelGroup) -> None:
        config = read_model_config(folder, dtype="float32")
        self.model = Decoder(config, group, backend=SharedBackend, device=DEVICE)
        load_weights(self.model, EngineConfig(model=config))
        spec = attention_spec(config, group, block_size=BLOCK_SIZE, device=DEVICE).grouped()
        self.num_groups = len(spec.group_windows)
        self.builder = SharedBackend.make_metadata_builder(spec)
        shape = self.num_groups * NUM_SEQUENCES * BLOCKS_PER_SEQUENCE, *spec.block_shape
        self.cache = torch.zeros(shape, dtype=storage_dtype(spec.cache_dtype), device=DEVICE)
        self.sampled = SampledAttention(
            self.cache, self.builder, SharedBackend.make_metadata_builder(spec)
        )

    @torch.inference_mode()
    def run(self, chunks: list[Chunk], *, samples_last_layer: bool) -> torch.Tensor:
        """Return the logits of the sampled tokens of a step; none are computed for no tokens."""
        blocks = np.arange(len(self.cache), dtype=np.int32)[::-1]
        tables = blocks.reshape(self.num_groups, NUM_SEQUENCES, BLOCKS_PER_SEQUENCE)
        query_lens = np.array([chunk.stop - chunk.first for chunk in chunks], dtype=np.int32)
        positions = np.concatenate([np.arange(one.first, one.stop) for one in chunks])
        owners = np.repeat([chunk.sequence for chunk in chunks], query_lens)
        slots = tables[:, owners, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
        first, *others = (
            AttentionBatch(
                num_prefills=int((query_lens > 1).sum()),
                query_lens=query_lens,
                seq_lens=np.array([chunk.stop for chunk in chunks], dtype=np.int32),
                block_tables=tables[group][[chunk.sequence for chunk in chunks]],
                slot_mapping=slots[group] + positions % BLOCK_SIZE,
            )
            for group in range(self.num_groups)
        )
        batch = replace(first, other_groups=tuple(others))
        is_sampled = np.array([chunk.is_sampled for chunk in chunks])
        indices = torch.from_numpy(np.cumsum(query_lens)[is_sampled] - 1).to(DEVICE)
        inputs = StepInputs(
            token_ids=token_ids()[positions].to(DEVICE),
            positions=torch.from_numpy(positions).to(DEVICE),
            logits_indices=indices,
            attention=batch,
            sampled_rows=np.arange(len(indices)),
            sampled_positions=np.arange(len(indices)),
            sampled_places=(indices, indices),
            sampled_sequences=is_sampled if samples_last_layer else None,
        )
        metadata = self.builder.build(batch)
        last = self.sampled.of_step(inputs, metadata)
        assert (last is not None) == samples_last_layer
        hidden = self.model.forward(
            inputs.token_ids,
            inputs.positions,
            CachedAttention(self.cache, metadata),
            indices,
            last,
        )
        return self.model.logits(hidden).whole().cpu() if len(hidden) else hidden.cpu()


class FullLinear(DenseLinear):
    """Takes at least one row, as kernels of GPUs do."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert len(x)
        return super().__call__(x)


# Two prompts begin; then a third one, the rest of the first, the start of a fourth, and a decode.
FIRST = [Chunk(0, 0, 9, is_sampled=False), Chunk(1, 0, 17, is_sampled=False)]
SECOND = [Chunk(2, 0, 23), Chunk(0, 9, 19), Chunk(3, 0, 5, is_sampled=False), Chunk(1, 17, 18)]
SAMPLED = [22, 18, 17]


@pytest.mark.parametrize(
    "name",
    [
        # Few programs run faster in the interpreter.
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "llama-6-heads-2-kv-biases",
                "mpt-12-heads",
                "gemma4-experts-keys-as-values",
                "gemma4-wide-full-layers",
            )
        ),
        # Windows and a soft cap, an MLP beside attention, heads that are rotated in part.
        "gemma2-capped",
        "cohere2-parallel",
        "glm-half-heads",
        # No rotation, a norm of each head, queries that are rotated in another way than keys.
        "mpt-clipped",
        "qwen3-biases-one-kv-head",
        "ministral3-growing-queries",
        # Layers without keys and values, and a norm of values.
        "gemma4-shared-embeddings",
    ],
)
def test_sampled_tokens_are_those_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_choice, "linear_kernel_class", lambda dtype, device: FullLinear)
    save_checkpoint(name, tmp_path)
    rank, whole = Rank(tmp_path, SoloGroup()), Rank(tmp_path, SoloGroup())
    assert len(rank.run(FIRST, samples_last_layer=True)) == 0
    whole.run(FIRST, samples_last_layer=False)
    logits = rank.run(SECOND, samples_last_layer=True)
    whole.run(SECOND, samples_last_layer=False)
    torch.testing.assert_close(logits, reference_logits(tmp_path)[SAMPLED], rtol=1e-4, atol=1e-4)
    # The keys and values of all tokens are in the cache.
    assert torch.equal(rank.cache, whole.cache)
    # Blocks of layers of two shapes may end with unused bytes.
    assert rank.cache[:, -1 if rank.cache.dim() > 2 else 0].count_nonzero() > 0


def test_layers_without_keys_and_values_compute_sampled_tokens_alone(tmp_path: Path) -> None:
    save_checkpoint("gemma4-shared-embeddings", tmp_path)
    rank = Rank(tmp_path, SoloGroup())
    rank.run(FIRST, samples_last_layer=False)
    num_rows: list[int] = []
    for layer in rank.model.fused.layers:

        def finish(tail: LayerTail, finish: Callable[[LayerTail], Delta] = layer.finish) -> Delta:
            num_rows.append(len(tail.residual))
            return finish(tail)

        layer.finish = finish  # type: ignore[method-assign]
    rank.run(SECOND, samples_last_layer=True)
    num_tokens = sum(chunk.stop - chunk.first for chunk in SECOND)
    assert num_rows == [num_tokens] * 3 + [len(SAMPLED)] * 3
