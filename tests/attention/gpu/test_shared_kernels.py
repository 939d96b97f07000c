"""The shared kernels through the whole GPU path of a backend, interpreted on a CPU."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from attention.abstract import (
    AttentionBatch,
    AttentionInputs,
    AttentionMetadata,
    AttentionParams,
    AttentionType,
)
from attention.gpu.decode_schedule import DecodeMemory
from attention.gpu.metadata import GpuMetadata, GpuMetadataBuilder
from attention.kernels.arguments import DecodeScratch
from attention.params import KV_CACHE_DTYPES
from pagedray.model_config import RopeConfig
from tests.attention.gpu_steps import check_graph_inputs
from tests.attention.rig import Rig, params_of
from workers.layers.rope import RotaryEmbedding
from workers.models.self_attention import CachedAttention, HeadInputs

pytest.importorskip("triton")

from tests.attention.shared_backend import SharedBackend

FEATURES: dict[str, AttentionParams] = {
    "plain": params_of(),
    "scale": params_of(scale=0.3),
    "window": params_of(sliding_window=6),
    "window+cap": params_of(sliding_window=6, soft_cap=2.0),
    "window+alibi": params_of(sliding_window=6, has_alibi=True),
    "5 per KV head, head size 24": params_of(5, 1, 24, soft_cap=2.0),
}


def rig_of(*layers: AttentionParams, dtype: torch.dtype = torch.float32) -> Rig:
    """Return a rig of the shared kernels."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Rig(*layers, backend=SharedBackend, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_equals_the_dense_reference(feature: str, dtype: torch.dtype) -> None:
    rig = rig_of(FEATURES[feature], dtype=dtype)
    a, b, c = rig.sequence(), rig.sequence(), rig.sequence()
    rig.step(prefills=[(a, 9), (b, 2)])
    rig.step(decodes=[a, b], num_padding=2)
    rig.step(prefills=[(c, 5), (a, 3)], decodes=[b], num_padding=1)
    rig.step(prefills=[(c, 7)], decodes=[b, a])
    rig.step(decodes=[c, b, a])


@pytest.mark.parametrize("window", [None, 6])
def test_sinks_equal_the_dense_reference(window: int | None) -> None:
    rig = rig_of(params_of(sliding_window=window, has_sinks=True))
    a, b = rig.sequence(), rig.sequence()
    rig.step(prefills=[(a, 9), (b, 2)])
    rig.step(prefills=[(b, 7)], decodes=[a], num_padding=1)


@pytest.mark.parametrize("fp8", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_cache_equals_the_dense_reference(fp8: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Numbers that need no rounding, because Triton's interpreter does not round to nearest.
    params = replace(params_of(fp8=fp8, sliding_window=6), k_scale=0.5, v_scale=2.0)
    rig = rig_of(params, dtype=torch.bfloat16)
    exact = Rig.random
    dtype = KV_CACHE_DTYPES[fp8]
    monkeypatch.setattr(Rig, "random", lambda *a: (2 * exact(*a)).to(dtype).to(torch.bfloat16))
    a, b = rig.sequence(), rig.sequence()
    rig.step(prefills=[(a, 9)])
    rig.step(prefills=[(a, 3), (b, 2)])
    rig.step(decodes=[a, b], num_padding=1)


def test_encoders_and_cross_attention_equal_the_dense_reference() -> None:
    types = AttentionType.ENCODER, AttentionType.DECODER, AttentionType.ENCODER_DECODER
    rig = rig_of(*(replace(params_of(has_sinks=True), attention_type=kind) for kind in types))
    a, b = rig.sequence(7), rig.sequence(12)
    rig.step(prefills=[(a, 3)])
    rig.step(prefills=[(b, 6)], decodes=[a], num_padding=1)
    rig.step(prefills=[(b, 2)], decodes=[a])
    rig.step(decodes=[b, a], num_padding=2)


@pytest.mark.parametrize("feature", ["plain", "window", "window+alibi"])
def test_encoder_only_sees_both_sides(feature: str) -> None:
    rig = rig_of(replace(FEATURES[feature], attention_type=AttentionType.ENCODER_ONLY))
    rig.step(prefills=[(rig.sequence(), 11), (rig.sequence(), 1)], num_padding=1)


def test_profile_run_writes_nothing_and_attends_among_its_tokens() -> None:
    rig = rig_of(params_of())
    batch = rig.batch([(rig.sequence(), 5), (rig.sequence(), 3)], [])
    query, key, value = rig.tokens(8)[0].to(rig.spec.device).split([64, 32, 32], 1)
    expected = rig.layers[0](query, key, value, rig.cache, rig.builder.build(batch))
    none = torch.empty(0, device=rig.spec.device)
    profile = replace(batch, block_tables=batch.block_tables[:, :0])
    out = rig.layers[0](query, key, value, none, rig.builder.build(profile))
    assert torch.equal(out, expected)


def test_parts_of_a_step_equal_the_whole() -> None:
    rig = rig_of(params_of())
    a, b = rig.sequence(), rig.sequence()
    rig.step(prefills=[(a, 5)])
    metadata = rig.builder.build(rig.batch([(b, 4)], [a]))
    query, key, value = rig.tokens(5)[0].to(rig.spec.device).split([64, 32, 32], 1)
    whole = rig.layers[0](query, key, value, rig.cache, metadata)
    prefills, decodes = metadata.prefill_metadata, metadata.decode_metadata
    assert prefills is not None
    assert decodes is not None
    first = rig.layers[0](query[:4], key[:4], value[:4], rig.cache, prefills)
    last = rig.layers[0](query[4:], key[4:], value[4:], rig.cache, decodes)
    assert torch.equal(torch.cat([first, last]), whole)


def test_graph_inputs_follow_each_step_at_their_addresses() -> None:
    layers = params_of(has_sinks=True), params_of(sliding_window=5, has_sinks=True)
    rig = rig_of(*layers)
    check_graph_inputs(rig, SharedBackend)


def test_buffers_of_the_caller_are_filled() -> None:
    rig = rig_of(params_of())
    a = rig.sequence()
    rig.step(prefills=[(a, 5)])
    state = SharedBackend.get_state_cls()(replace(rig.spec, max_seq_len=32))
    with state.graph_capture(2):
        captured = state.graph_capture_get_metadata_for_batch(2)
        clone = state.graph_clone(2)
    others = {
        name: torch.full_like(buffer, -7)
        for name, buffer in clone.get_graph_input_buffers(captured).items()
    }
    live = rig.builder.build(rig.batch([], [a]))
    clone.prepare_graph_input_buffers(others, live)
    assert others["seq_lens"].tolist() == [6, 0]
    assert others["slot_mapping"].tolist() == [int(live.batch.slot_mapping[0]), -1]
    assert others["block_tables"][0, :2].tolist() == a.blocks


class LentMemory(DecodeMemory):
    """Knows what of the memory that it has lent still exists."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.lent: list[weakref.ref[torch.Tensor]] = []

    def reserve(self, num_elements: int, num_arrivals: int) -> DecodeScratch:
        scratch = super().reserve(num_elements, num_arrivals)
        self.lent.append(weakref.ref(scratch.parts))
        return scratch


def test_graph_keeps_the_memory_that_it_was_captured_with() -> None:
    # Layers without a window merge more parts, for which the memory grows.
    rig = rig_of(params_of(sliding_window=5), params_of())
    a = rig.sequence()
    rig.step(prefills=[(a, 9)])
    memory = LentMemory(rig.spec.device)
    spec = replace(rig.spec, max_seq_len=32)
    builder = SharedBackend.get_builder_cls()(spec, graph_batch_size=4, memory=memory)
    builder.build(rig.batch([], [])).prepare_step()
    captured = [ref() for ref in memory.lent]
    assert len({id(parts) for parts in captured}) == 2
    del captured
    for _ in range(2):
        builder.build(rig.batch([], [a])).prepare_step()
        assert all(ref() is not None for ref in memory.lent[:2])


@pytest.mark.parametrize("graph_batch_size", [None, 4])
def test_advanced_steps_equal_steps_that_are_uploaded(graph_batch_size: int | None) -> None:
    kinds = AttentionType.DECODER, AttentionType.ENCODER_DECODER
    rig = rig_of(*(replace(params_of(), attention_type=kind) for kind in kinds))
    a, b = rig.sequence(7), rig.sequence(3)
    rig.step(prefills=[(a, 3), (b, 6)])
    spec = replace(rig.spec, max_seq_len=32)

    def builder() -> GpuMetadataBuilder:
        return SharedBackend.get_builder_cls()(spec, graph_batch_size=graph_batch_size)

    tables = np.array([[3, 5, 9, 4], [7, 2, 8, 6]], dtype=np.int32)
    batch = replace(rig.batch([], [a, b]), block_tables=tables)
    kept = builder()
    step = kept.build(batch)
    address = step.prepare_step().slot_mapping.data_ptr()
    for _ in range(5):
        step, batch = step.advance_step(), batch.advanced(spec.block_size)
        assert_same_step(step, builder().build(batch))
        assert step.prepare_step().slot_mapping.data_ptr() == address


def test_step_that_was_overwritten_is_uploaded_when_it_advances() -> None:
    rig = rig_of(params_of())
    a, b = rig.sequence(), rig.sequence()
    rig.step(prefills=[(a, 3), (b, 5)])
    step = rig.builder.build(rig.batch([], [a]))
    expected = rig.builder.alike().build(step.batch.advanced(rig.spec.block_size))
    assert step.prepare_step().slot_mapping.tolist() == step.batch.slot_mapping.tolist()
    assert rig.builder.build(rig.batch([], [b])).prepare_step().decodes is not None
    assert_same_step(step.advance_step(), expected)


def assert_same_step(step: AttentionMetadata, expected: AttentionMetadata) -> None:
    """Check that two decodes are equal on the device and on the host."""
    assert isinstance(step, GpuMetadata)
    assert isinstance(expected, GpuMetadata)
    batch, other = step.prepare_step(), expected.prepare_step()
    assert batch.slot_mapping.tolist() == other.slot_mapping.tolist()
    assert batch.num_padding == other.num_padding
    for kind in (AttentionType.DECODER, AttentionType.ENCODER_DECODER):
        (_, rows), (_, others) = batch.sub_batches_of(kind), other.sub_batches_of(kind)
        assert (rows is None) == (others is None)
        if rows is None or others is None:
            continue
        assert rows.block_tables is not None
        assert others.block_tables is not None
        assert rows.seq_lens.tolist() == others.seq_lens.tolist()
        assert rows.host_seq_lens.tolist() == others.host_seq_lens.tolist()
        assert rows.block_tables.tolist() == others.block_tables.tolist()
        assert (rows.max_seq_len, rows.has_no_context) == (
            others.max_seq_len,
            others.has_no_context,
        )


def test_sequence_beyond_the_graph_is_rejected() -> None:
    rig = rig_of(params_of())
    a = rig.sequence()
    rig.step(prefills=[(a, 8)])
    state = SharedBackend.get_state_cls()(replace(rig.spec, max_seq_len=8))
    with state.graph_capture(1):
        captured = state.graph_capture_get_metadata_for_batch(1)
        clone = state.graph_clone(1)
        buffers = clone.get_graph_input_buffers(captured)
    with pytest.raises(ValueError, match="9 tokens does not fit a graph for 8"):
        clone.prepare_graph_input_buffers(buffers, rig.builder.build(rig.batch([], [a])))


def test_builder_names_the_providers_of_its_layers() -> None:
    layers = params_of(), params_of(soft_cap=2.0), params_of()
    spec = Rig.spec_of(*layers, dtype=torch.float32, block_size=4, device="cpu")
    providers = SharedBackend.make_metadata_builder(spec).providers()
    assert providers == {part: {"shared": 3} for part in ("prefill", "prefill_ragged", "decode")}


def test_keys_written_ahead_are_attended_to_as_in_a_whole_step() -> None:
    rig = rig_of(params_of(), params_of(sliding_window=5, has_sinks=True), params_of())
    a, b, c = rig.sequence(), rig.sequence(), rig.sequence()
    rig.step(prefills=[(a, 5), (c, 3)])
    batch = rig.batch([(b, 4)], [a, c])
    inputs = [one.to(rig.spec.device).split([64, 32, 32], 1) for one in rig.tokens(9)]
    before = rig.cache.clone()
    whole = rig.builder.build(batch)
    expected = [
        layer(*(tensor[:6] for tensor in one), rig.cache, whole)
        for layer, one in zip(rig.layers, inputs, strict=True)
    ]
    expected_cache = rig.cache.clone()
    rig.cache.copy_(before)

    metadata = rig.builder.build(batch)
    slots = torch.full((9,), -1, dtype=torch.int64, device=rig.spec.device)
    (slots[:6],) = metadata.device_slot_mappings
    for layer_index, (query, key, value) in enumerate(inputs):
        rig.builder.write_layer(layer_index, key, value, rig.cache, slots)
        query, key, value = (tensor.unflatten(1, (-1, 16)) for tensor in (query, key, value))
        out = torch.full((9, 64), -7.0, device=rig.spec.device)
        cached = AttentionInputs(
            query, key, value, sinks=rig.layers[layer_index].sinks, is_cached=True
        )
        metadata.attend(layer_index, cached, rig.cache, out.unflatten(1, (-1, 16)))
        assert torch.equal(out[:6], expected[layer_index])
        # Nothing is computed for padding.
        assert (out[6:] == -7.0).all()
    assert torch.equal(rig.cache.nan_to_num(9.0), expected_cache.nan_to_num(9.0))


@pytest.mark.parametrize("prompt_lens", [[5, 16, 3], [5, 16, 3, 4, 1, 8]])
def test_decodes_rotate_their_tokens_themselves(prompt_lens: list[int]) -> None:
    rig = rig_of(params_of(), params_of(sliding_window=5, has_sinks=True))
    sequences = [rig.sequence() for _ in prompt_lens]
    rig.step(prefills=list(zip(sequences, prompt_lens, strict=True)))
    batch = rig.batch([], sequences)
    device = rig.spec.device
    embedding = RotaryEmbedding(
        RopeConfig(),
        head_size=16,
        num_query_heads=4,
        max_positions=40,
        dtype=torch.float32,
        device=device,
    )
    rotation = embedding.rotation_at(torch.tensor(prompt_lens, device=device))
    inputs = [one.to(device) for one in rig.tokens(len(prompt_lens))]
    before = rig.cache.clone()

    def attended(*, by_kernel: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
        rig.cache.copy_(before)
        metadata = rig.builder.build(batch)
        assert metadata.rotates_layer(0)
        step = CachedAttention(rig.cache, metadata)
        outs = []
        for layer, rows in zip(rig.layers, inputs, strict=True):
            heads, value = rows.clone().split([96, 32], 1)
            heads = heads.unflatten(1, (6, 16))
            value = value.unflatten(1, (2, 16))
            if by_kernel:
                outs.append(step.attend(layer, HeadInputs(heads, value, rotation)))
            else:
                outs.append(step.attend(layer, HeadInputs(rotation(heads), value, None)))
        return outs, rig.cache.nan_to_num(9.0)

    found, cache = attended(by_kernel=True)
    expected, expected_cache = attended(by_kernel=False)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache, expected_cache, rtol=1e-5, atol=1e-5)
    with_prefill = rig.builder.build(rig.batch([(rig.sequence(), 4)], sequences))
    assert not with_prefill.rotates_layer(0)


@pytest.mark.parametrize("num_drafts", [2, 6])
def test_decodes_of_a_chain_see_the_tokens_of_the_others(num_drafts: int) -> None:
    rig = rig_of(params_of(), params_of(sliding_window=5, has_sinks=True))
    sequence = rig.sequence()
    rig.step(prefills=[(sequence, 6)])
    # As one sequence that gets a token in each step, and as a chain.
    rows = [replace(sequence, length=6 + index) for index in range(num_drafts + 1)]
    steps = [rig.batch([], [row]) for row in rows]
    chain = replace(rig.batch([], rows), has_chains=True)
    inputs = [one.to(rig.spec.device).unflatten(1, (8, 16)) for one in rig.tokens(len(rows))]
    before = rig.cache.clone()

    def attended(batch: AttentionBatch, first: int) -> list[torch.Tensor]:
        metadata = rig.builder.build(batch)
        # The kernel must not write tokens while it reads tokens of other decodes.
        assert metadata.rotates_layer(0) == (not batch.has_chains)
        step = CachedAttention(rig.cache, metadata)
        outs = []
        for layer, tokens in zip(rig.layers, inputs, strict=True):
            heads, value = tokens[first : first + batch.num_decodes].clone().split([6, 2], 1)
            outs.append(step.attend(layer, HeadInputs(heads, value, None)).clone())
        return outs

    one_by_one = [attended(batch, index) for index, batch in enumerate(steps)]
    expected = [torch.cat(outs) for outs in zip(*one_by_one, strict=True)]
    expected_cache = rig.cache.clone()
    rig.cache.copy_(before)
    torch.testing.assert_close(attended(chain, 0), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(rig.cache.nan_to_num(9.0), expected_cache.nan_to_num(9.0))


@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("lengths", [(6, 1, 11), (301, 1, 20)], ids=["short", "long"])
def test_device_subtracts_the_excess_of_lengths(lengths: tuple[int, ...], is_graph: bool) -> None:
    rig = rig_of(params_of(), params_of(soft_cap=2.0))
    sequences = [rig.sequence() for _ in lengths]
    rig.step(prefills=list(zip(sequences, lengths, strict=True)))
    excess = [9, 0, 4]
    # Chains of two drafts, with their lengths, and with lengths that are too large.
    exact, large = (
        [
            replace(sequence, length=sequence.length + more + place)
            for sequence, more in zip(sequences, numbers, strict=True)
            for place in range(3)
        ]
        for numbers in ([0, 0, 0], excess)
    )
    device = rig.spec.device
    batches = [
        replace(rig.batch([], exact), has_chains=True),
        replace(
            rig.batch([], large),
            has_chains=True,
            excess=torch.tensor(excess, device=device).repeat_interleave(3),
            max_excess=9,
        ),
    ]
    assert (batches[0].seq_lens != batches[1].seq_lens).any()
    builder = rig.builder
    if is_graph:
        spec = replace(rig.spec, max_seq_len=400)
        builder = SharedBackend.builder_cls(spec, graph_batch_size=12)
    assert builder.takes_excess
    inputs = [one.to(device).unflatten(1, (8, 16)) for one in rig.tokens(9)]
    before, results = rig.cache.clone(), []
    for batch in batches:
        rig.cache.copy_(before)
        metadata = builder.build(batch)
        step = CachedAttention(rig.cache, metadata)
        outs = []
        for layer, tokens in zip(rig.layers, inputs, strict=True):
            padded = torch.cat((tokens, tokens[:3])) if is_graph else tokens.clone()
            heads, value = padded.split([6, 2], 1)
            outs.append(step.attend(layer, HeadInputs(heads, value, None))[:9].clone())
        results.append((outs, rig.cache.clone()))
    (expected, expected_cache), (found, cache) = results
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(cache.nan_to_num(9.0), expected_cache.nan_to_num(9.0))


def test_windows_and_libraries_take_no_excess() -> None:
    assert not rig_of(params_of(), params_of(sliding_window=6)).builder.takes_excess
    kinds = AttentionType.ENCODER, AttentionType.DECODER, AttentionType.ENCODER_DECODER
    rig = rig_of(*(replace(params_of(), attention_type=kind) for kind in kinds))
    assert not rig.builder.takes_excess
