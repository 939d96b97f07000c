"""What every backend promises beyond single steps; each step is also checked by the rig."""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attention.abstract import AttentionBatch, AttentionParams, AttentionType
from attention.cpu.torch_sdpa import TorchSDPABackend
from tests.attention.dense_reference import dense_attention, relative_error
from tests.attention.rig import Rig, RigSequence, check_chunks, params_of

pytestmark = pytest.mark.usefixtures("both_decodes")


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 7, 8, 9])
def test_window_is_exact_to_the_token(window: int) -> None:
    rig = Rig(params_of(sliding_window=window), block_size=4)
    for length in range(max(1, window - 1), window + 6):
        sequence = rig.sequence()
        rig.step(prefills=[(sequence, length)])
        for _ in range(3):
            rig.step(decodes=[sequence])
        rig.step(prefills=[(sequence, 6)])
        rig.release(sequence)


@pytest.mark.parametrize("window", [None, 6])
def test_decode_equals_the_last_row_of_a_prefill(window: int | None) -> None:
    rig = Rig(params_of(sliding_window=window))
    tokens = rig.tokens(19)
    whole, parts = rig.sequence(), rig.sequence()
    prefill = rig.step(prefills=[(whole, 19)], tokens=tokens)
    rig.step(prefills=[(parts, 18)], tokens=[fused[:18] for fused in tokens])
    decode = rig.step(decodes=[parts], tokens=[fused[18:] for fused in tokens])
    assert relative_error(decode[0], prefill[0][18:]) < 1e-5


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("chunks", [(23,), (1, 22), (4, 4, 15), (7, 9, 7), (1,) * 23])
def test_chunked_prompt_equals_the_whole(chunks: tuple[int, ...], window: int | None) -> None:
    rig = Rig(params_of(sliding_window=window), params_of(has_alibi=True))
    check_chunks(rig, chunks)


def test_sequence_survives_a_swap_to_other_blocks() -> None:
    rig = Rig(params_of(), params_of(sliding_window=5))
    a, b = rig.sequence(), rig.sequence()
    rig.step(prefills=[(a, 11), (b, 6)])
    host = torch.zeros_like(rig.cache[:8])
    places = [6, 1, 2]
    TorchSDPABackend.swap_blocks(rig.cache, host, list(zip(a.blocks, places, strict=True)))
    left = a.blocks
    rig.release(a)
    a.blocks = [rig.free.pop(0) for _ in places]
    assert not set(left) & set(a.blocks)
    TorchSDPABackend.swap_blocks(host, rig.cache, list(zip(places, a.blocks, strict=True)))
    rig.step(decodes=[a, b])
    rig.step(prefills=[(a, 3)], decodes=[b])


def test_prompts_of_equal_length_need_not_be_neighbors() -> None:
    rig = Rig(params_of())
    a, b, c, d = (rig.sequence() for _ in range(4))
    rig.step(prefills=[(a, 3)])
    rig.step(prefills=[(b, 5), (a, 4), (c, 5), (d, 5)])
    rig.step(decodes=[a, b, c, d])


@pytest.mark.parametrize("length", [127, 128, 129, 257])
def test_tiled_prompt_equals_the_whole(length: int) -> None:
    layers = params_of(has_alibi=True), params_of(soft_cap=2.0), params_of(sliding_window=130)
    rig = Rig(*layers, num_blocks=160)
    a, b = rig.sequence(), rig.sequence()
    rig.step(prefills=[(a, length), (b, 3)])
    rig.step(prefills=[(b, length)])


def test_forked_sequences_do_not_write_into_each_other() -> None:
    rig = Rig(params_of(), params_of())
    parent = rig.sequence()
    rig.step(prefills=[(parent, 10)])
    children = [rig.fork(parent) for _ in range(3)]
    for _ in range(7):
        rig.step(decodes=[parent, *children])
    assert children[0].blocks[:2] == parent.blocks[:2]


def test_layers_with_and_without_a_window_interleave() -> None:
    local, full = params_of(sliding_window=5), params_of()
    rig = Rig(local, full, local, params_of(has_alibi=True), full, params_of(soft_cap=3.0))
    a, b = rig.sequence(), rig.sequence()
    rig.step(prefills=[(a, 13)])
    rig.step(prefills=[(b, 9)], decodes=[a])
    rig.step(prefills=[(b, 6)], decodes=[a])
    rig.step(decodes=[a, b], num_padding=1)


@pytest.mark.parametrize("has_alibi", [False, True])
def test_decodes_of_very_different_lengths_share_chunks(has_alibi: bool) -> None:
    # Blocks so large that a chunk holds few of them, so that sequences are sorted and cut.
    rig = Rig(params_of(8, 8, 128, has_alibi=has_alibi), block_size=16, num_blocks=40)
    sequences = [rig.sequence() for _ in range(9)]
    lengths = [3, 90, 17, 5, 64, 33, 32, 31, 1]
    rig.step(prefills=list(zip(sequences, lengths, strict=True)))
    for _ in range(2):
        rig.step(decodes=sequences, num_padding=2)
    plan = rig.builder.build(rig.batch([], sequences)).layer_plan(0)
    if rig.uses_kernel:
        assert plan.decodes is not None
        return
    assert len(plan.chunks) > 2
    assert plan.chunks[0].tokens is not None


def test_soft_cap_is_applied() -> None:
    outputs = []
    for cap in (None, 5.0):
        rig = Rig(params_of(soft_cap=cap))
        rig.magnitude = 6.0
        sequence = rig.sequence()
        rows = [*rig.step(prefills=[(sequence, 9)]), *rig.step(prefills=[(sequence, 5)])]
        outputs.append(torch.cat([*rows, *rig.step(decodes=[sequence])]))
    assert relative_error(outputs[1], outputs[0]) > 0.1


def test_scale_is_applied_on_every_path() -> None:
    outputs = []
    for scale in (0.25, 0.75):
        rig = Rig(params_of(scale=scale))
        sequence = rig.sequence()
        outputs.append(
            [
                rig.step(prefills=[(sequence, 9)])[0],
                rig.step(prefills=[(sequence, 5)])[0],
                rig.step(decodes=[sequence])[0],
            ]
        )
    for small, large in zip(*outputs, strict=True):
        assert relative_error(large, small) > 0.1


def test_profile_run_attends_among_its_tokens_and_writes_nothing() -> None:
    rig = Rig(params_of(sliding_window=6), params_of())
    a, b = rig.sequence(), rig.sequence()
    rig.step(prefills=[(b, 4)])
    before = rig.cache.clone()
    metadata = rig.builder.build(rig.batch([(a, 9), (b, 3)], [], num_padding=2))
    query, key, value = rig.random(14, 64), rig.random(14, 32), rig.random(14, 32)
    for layer in rig.layers:
        output = layer(query, key, value, rig.cache.new_empty(0), metadata)
        for rows in (slice(0, 9), slice(9, 12)):
            q, k, v = (t[rows].unflatten(1, (-1, 16)) for t in (query, key, value))
            reference = dense_attention(q, k, v, layer.params).flatten(1)
            assert relative_error(output[rows], reference) < 1e-5
        assert (output[12:] == 0).all()
    assert torch.equal(rig.cache.nan_to_num(7), before.nan_to_num(7))


def test_metadata_of_a_profile_run_still_serves_a_cache() -> None:
    rig = Rig(params_of())
    a, b = rig.sequence(), rig.sequence()
    rig.step(prefills=[(a, 9)])
    batch = rig.batch([(b, 5)], [a])
    parts = rig.tokens(6)[0].split([64, 32, 32], 1)
    layer = rig.layers[0]
    expected = layer(*parts, rig.cache, rig.builder.build(batch))
    metadata = rig.builder.build(batch)
    layer(*parts, rig.cache.new_empty(0), metadata)
    assert torch.equal(layer(*parts, rig.cache, metadata), expected)


def test_tokens_without_a_slot_are_not_written_and_leave_nothing_stale() -> None:
    rig = Rig(params_of(sliding_window=4), block_size=4)
    sequence, other = rig.sequence(), rig.sequence()
    # In a chunk with another length, a sequence's slots are masked where they are not its own.
    rig.step(prefills=[(other, 12)])
    batch = rig.batch([(sequence, 10)], [])
    # Tokens that no later query can see need no slot; some share a block with tokens that do.
    slots = batch.slot_mapping.copy()
    slots[:7] = -1
    tokens = rig.tokens(10)[0]
    parts = tokens.split([64, 32, 32], 1)
    layer = rig.layers[0]
    layer(*parts, rig.cache, rig.builder.build(replace(batch, slot_mapping=slots)))
    assert rig.cache[sequence.blocks[0]].isnan().all()
    sequence.length = 10
    sequence.keys[0] = parts[1].unflatten(1, (2, 16))
    sequence.values[0] = parts[2].unflatten(1, (2, 16))
    for _ in range(3):
        rig.step(decodes=[sequence, other])


def test_step_of_padding_alone_gives_zeros() -> None:
    rig = Rig(params_of())
    outputs = rig.step(num_padding=3)
    assert torch.equal(outputs[0], torch.zeros(3, 64))
    assert rig.cache.isnan().all()


def test_output_is_written_to_the_given_tensor() -> None:
    rig = Rig(params_of())
    a = rig.sequence()
    metadata = rig.builder.build(rig.batch([(a, 5)], [], num_padding=1))
    query, key, value = rig.random(6, 64), rig.random(6, 32), rig.random(6, 32)
    out = torch.full((6, 64), float("nan"))
    result = rig.layers[0](query, key, value, rig.cache, metadata, out=out)
    assert result is out
    assert not out.isnan().any()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_alibi_slopes_of_ranks_equal_the_whole(num_ranks: int) -> None:
    whole = params_of(8, 2, 16, has_alibi=True)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, heads, 16, generator=generator) for heads in (8, 2, 2))
    expected = dense_attention(q, k, v, whole)
    outputs = []
    for rank in range(num_ranks):
        part = whole.shard(rank, num_ranks)
        rig = Rig(part)
        sequence = rig.sequence()
        heads = slice(rank * part.num_heads, (rank + 1) * part.num_heads)
        first_kv = rank * 2 // num_ranks
        kv_heads = slice(first_kv, first_kv + part.num_kv_heads)
        rows = torch.cat([q[:, heads], k[:, kv_heads], v[:, kv_heads]], dim=1).flatten(1)
        prefill = rig.step(prefills=[(sequence, 8)], tokens=[rows[:8]])[0]
        decode = rig.step(decodes=[sequence], tokens=[rows[8:]])[0]
        outputs.append(torch.cat([prefill, decode]).unflatten(1, (-1, 16)))
    assert relative_error(torch.cat(outputs, dim=1), expected) < 1e-5


def test_advanced_metadata_equals_that_of_the_next_step() -> None:
    rig = Rig(params_of(sliding_window=6))
    sequences = [rig.sequence() for _ in range(2)]
    rig.step(prefills=[(sequences[0], 9), (sequences[1], 3)])
    first = rig.batch([], sequences, num_padding=1)
    for sequence in sequences:
        sequence.length += 1
    second = rig.batch([], sequences, num_padding=1)
    roomy = replace(first, block_tables=second.block_tables)
    advanced = rig.builder.build(roomy).advance_step().batch
    assert np.array_equal(advanced.seq_lens, second.seq_lens)
    assert np.array_equal(advanced.slot_mapping, second.slot_mapping)


def test_prefills_do_not_advance() -> None:
    rig = Rig(params_of())
    metadata = rig.builder.build(rig.batch([(rig.sequence(), 4)], []))
    with pytest.raises(ValueError, match="1 prefills"):
        metadata.advance_step()


def test_decodes_do_not_advance_past_their_block_tables() -> None:
    batch = AttentionBatch(
        num_prefills=0,
        query_lens=np.array([1], dtype=np.int32),
        seq_lens=np.array([8], dtype=np.int32),
        block_tables=np.array([[3, 1]], dtype=np.int32),
        slot_mapping=np.array([7], dtype=np.int64),
    )
    with pytest.raises(ValueError, match="needs block 2"):
        batch.advanced(4)


def test_parts_of_metadata_compute_parts_of_the_step() -> None:
    rig = Rig(params_of())
    a, b = rig.sequence(), rig.sequence()
    rig.step(prefills=[(a, 6)])
    batch = rig.batch([(b, 5)], [a], num_padding=1)
    parts = rig.tokens(7)[0].split([64, 32, 32], 1)
    layer = rig.layers[0]
    whole = rig.builder.build(batch)
    expected = layer(*parts, rig.cache, whole)
    assert whole.prefill_metadata is not None
    assert whole.decode_metadata is not None
    prefill = layer(*(t[:5] for t in parts), rig.cache, whole.prefill_metadata)
    decode = layer(*(t[5:] for t in parts), rig.cache, whole.decode_metadata)
    assert torch.equal(torch.cat([prefill, decode]), expected)
    assert whole.prefill_metadata.decode_metadata is None
    assert whole.decode_metadata.prefill_metadata is None


def test_metadata_is_rebuilt_from_a_dictionary() -> None:
    rig = Rig(params_of())
    a = rig.sequence()
    metadata = rig.builder.build(rig.batch([(a, 6)], []))
    fields = metadata.asdict_zerocopy()
    assert fields["slot_mapping"] is metadata.slot_mapping
    assert "seq_lens" not in metadata.asdict_zerocopy({"seq_lens"})
    other = TorchSDPABackend.make_metadata(rig.spec, **fields)
    parts = rig.tokens(6)[0].split([64, 32, 32], 1)
    expected = rig.layers[0](*parts, rig.cache, metadata)
    # Kernels in C compute it, whatever computed the step before.
    torch.testing.assert_close(rig.layers[0](*parts, rig.cache, other), expected)


def test_steady_decodes_reuse_their_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rig, "uses_kernel", False)
    rig = Rig(params_of(), block_size=16)
    a = rig.sequence()
    rig.step(prefills=[(a, 9)])
    addresses = set()
    for _ in range(5):
        rig.step(decodes=[a])
        gather = rig.builder.build(rig.batch([], [a])).layer_plan(0).chunks[0].gather
        addresses.add((gather.indices.data_ptr(), gather.views.scratch.data_ptr()))
    assert len(addresses) == 1


def test_views_do_not_keep_a_cache_alive() -> None:
    # Outside of inference mode a view refers to the tensor that it is of.
    with torch.inference_mode(False), torch.no_grad():
        rig = Rig(params_of())
        rig.step(prefills=[(rig.sequence(), 9)])
        (views,) = rig.builder.views.views_of(rig.cache)
        blocks = weakref.ref(views.blocks)
        del views
        rig.cache = torch.empty(0)
        gc.collect()
        assert blocks() is None


def test_cache_of_another_shape_is_rejected() -> None:
    rig = Rig(params_of())
    a = rig.sequence()
    rig.step(prefills=[(a, 3)])
    with pytest.raises(ValueError, match="must be"):
        rig.builder.views.views_of(rig.cache.flatten(0, 1))


def test_builder_names_the_providers_of_its_layers() -> None:
    rig = Rig(params_of(), params_of(sliding_window=3))
    providers = rig.builder.providers()
    assert providers["prefill"] == {"native" if rig.builder.prefill_kernels[0] else "torch": 2}
    assert providers["decode"] == {"native" if rig.builder.decode_kernels[0] else "torch": 2}


@st.composite
def layers(draw: st.DrawFn) -> list[AttentionParams]:
    """Return one to three layers that share a cache."""
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    num_heads = num_kv_heads * draw(st.sampled_from([1, 2, 5]))
    # Large heads make large blocks, so that decodes are cut into several chunks.
    head_size = draw(st.sampled_from([8, 40, 256]))
    fp8 = draw(st.sampled_from(["auto", "auto", "fp8_e4m3", "fp8_e5m2"]))
    decoder = [
        params_of(
            num_heads,
            num_kv_heads,
            head_size,
            scale=draw(st.sampled_from([None, 0.1])),
            sliding_window=draw(st.sampled_from([None, 1, 5, 16, 33])),
            soft_cap=draw(st.sampled_from([None, None, 4.0])),
            has_alibi=draw(st.booleans()),
            fp8=fp8,
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    if draw(st.booleans()):
        return decoder
    encoder = replace(decoder[0], attention_type=AttentionType.ENCODER)
    cross = replace(
        decoder[0],
        attention_type=AttentionType.ENCODER_DECODER,
        sliding_window=None,
        alibi_slopes=None,
    )
    return [encoder, *decoder, cross]


@given(data=st.data())
@settings(
    max_examples=30,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_random_steps_equal_the_dense_reference(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    rig = Rig(
        *data.draw(layers()),
        block_size=block_size,
        num_blocks=2400 // block_size,
        seed=data.draw(st.integers(0, 9)),
    )
    running: list[RigSequence] = []
    for _ in range(data.draw(st.integers(2, 6))):
        num_new = data.draw(st.integers(0, 3))
        new = [rig.sequence(data.draw(st.integers(0, 40))) for _ in range(num_new)]
        chunked = [s for s in running if data.draw(st.integers(0, 3)) == 0]
        decodes = [s for s in running if s not in chunked and data.draw(st.booleans())]
        prefills = [(s, data.draw(st.integers(1, 40))) for s in chunked + new]
        rig.step(prefills, decodes, num_padding=data.draw(st.integers(0, 2)))
        running += new
        for sequence in [s for s in running if data.draw(st.integers(0, 5)) == 0]:
            running.remove(sequence)
            rig.release(sequence)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_chunked_prompt_equals_the_dense_reference(dtype: torch.dtype) -> None:
    rig = Rig(
        params_of(2, 1, 8), params_of(2, 1, 8, sliding_window=200), dtype=dtype, block_size=16
    )
    sequence = rig.sequence()
    for count in (300, 7, 500):
        rig.step(prefills=[(sequence, count)])
    rig.step(decodes=[sequence])
