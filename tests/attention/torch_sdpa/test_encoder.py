"""What encoders and cross attention promise beyond single steps; the rig checks each step."""

from dataclasses import replace

import pytest
import torch

from attention.abstract import AttentionParams, AttentionType
from attention.cpu.torch_sdpa import TorchSDPABackend
from tests.attention.dense_reference import dense_attention, relative_error
from tests.attention.rig import Rig, RigSequence, params_of

pytestmark = pytest.mark.usefixtures("both_decodes")

ENCODER = params_of(attention_type=AttentionType.ENCODER)
CROSS = params_of(attention_type=AttentionType.ENCODER_DECODER)
DECODER = params_of()


def model_rig(*, fp8: str = "auto") -> Rig:
    """Return a model of two encoder and two decoder layers."""
    layers = ENCODER, ENCODER, DECODER, CROSS, DECODER, CROSS
    return Rig(*(replace(layer, kv_cache_dtype=fp8) for layer in layers))


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8])
def test_window_of_an_encoder_is_exact_on_both_sides(window: int) -> None:
    kind = AttentionType.ENCODER_ONLY
    rig = Rig(params_of(sliding_window=window, attention_type=kind))
    for length in range(max(1, window - 1), window + 6):
        rig.step(prefills=[(rig.sequence(), length), (rig.sequence(), 2)])


@pytest.mark.parametrize("length", [127, 128, 129, 257])
def test_tiled_encoder_equals_the_whole(length: int) -> None:
    kind = AttentionType.ENCODER_ONLY
    features = (
        params_of(has_alibi=True),
        params_of(soft_cap=2.0),
        params_of(sliding_window=130),
        params_of(),
    )
    rig = Rig(*(replace(params, attention_type=kind) for params in features))
    rig.step(prefills=[(rig.sequence(), 3), (rig.sequence(), length)])


def test_layers_of_self_and_cross_attention_share_their_place_in_the_cache() -> None:
    rig = model_rig()
    assert rig.cache.shape[1] == 2
    a, b = rig.sequence(7), rig.sequence(2)
    rig.step(prefills=[(a, 3), (b, 1)])
    for _ in range(6):
        rig.step(decodes=[a, b], num_padding=1)


def test_some_sequences_run_their_encoder_while_others_decode() -> None:
    rig = model_rig()
    a, b, c, d = rig.sequence(11), rig.sequence(4), rig.sequence(1), rig.sequence(8)
    rig.step(prefills=[(a, 1)])
    rig.step(prefills=[(b, 5), (c, 1)], decodes=[a], num_padding=2)
    rig.step(prefills=[(d, 2), (b, 3)], decodes=[c, a])
    rig.step(decodes=[d, c, b, a])


def test_chunks_of_a_decoder_see_all_keys_of_the_encoder() -> None:
    rig = model_rig()
    a = rig.sequence(9)
    for count in (4, 1, 6):
        rig.step(prefills=[(a, count)])


def test_prefix_of_the_decoder_is_found_while_the_encoder_runs() -> None:
    rig = model_rig()
    parent = rig.sequence(6)
    rig.step(prefills=[(parent, 8)])
    child = rig.fork(parent)
    child.is_encoded, child.num_encoder_tokens, child.encoder_blocks = False, 13, []
    forget_encoder(rig, child)
    rig.step(prefills=[(child, 5)], decodes=[parent])
    rig.step(decodes=[child, parent])


def forget_encoder(rig: Rig, sequence: RigSequence) -> None:
    """Forget the keys of another encoder's tokens."""
    for i, params in enumerate(rig.spec.layers):
        if params.attention_type is not AttentionType.DECODER:
            sequence.keys[i], sequence.values[i] = sequence.keys[i][:0], sequence.values[i][:0]


def test_encoder_survives_a_swap_to_other_blocks() -> None:
    rig = model_rig()
    a, b = rig.sequence(10), rig.sequence(3)
    rig.step(prefills=[(a, 6), (b, 2)])
    left = a.blocks + a.encoder_blocks
    host = torch.zeros_like(rig.cache[: len(left)])
    TorchSDPABackend.swap_blocks(rig.cache, host, list(zip(left, range(len(left)), strict=True)))
    num_own = len(a.blocks)
    rig.release(a)
    places = [rig.free.pop(0) for _ in left]
    TorchSDPABackend.swap_blocks(host, rig.cache, list(enumerate(places)))
    a.blocks, a.encoder_blocks = places[:num_own], places[num_own:]
    rig.step(decodes=[a, b])


def test_sequences_without_encoder_tokens_see_nothing() -> None:
    rig = model_rig()
    a, b = rig.sequence(0), rig.sequence(5)
    prefill = rig.step(prefills=[(a, 3), (b, 1)])
    decode = rig.step(decodes=[a, b])
    assert (prefill[3][:3] == 0).all()
    assert (decode[3][0] == 0).all()


def test_soft_cap_and_scale_of_cross_attention_are_applied() -> None:
    outputs = []
    for params in (CROSS, replace(CROSS, soft_cap=2.0), replace(CROSS, scale=0.6)):
        rig = Rig(DECODER, params)
        rig.magnitude = 3.0
        a = rig.sequence(9)
        outputs.append(torch.cat([rig.step(prefills=[(a, 4)])[1], rig.step(decodes=[a])[1]]))
    assert relative_error(outputs[1], outputs[0]) > 0.05
    assert relative_error(outputs[2], outputs[0]) > 0.05


@pytest.mark.parametrize(
    ("params", "queries", "keys"),
    [
        (ENCODER, [5, 8], [5, 8]),
        (CROSS, [9, 3], [5, 8]),
        (params_of(attention_type=AttentionType.ENCODER_ONLY, sliding_window=3), [9, 3], [9, 3]),
    ],
    ids=["encoder", "cross", "encoder only"],
)
def test_profile_run_writes_nothing(
    params: AttentionParams, queries: list[int], keys: list[int]
) -> None:
    rig = Rig(DECODER, params, CROSS)
    layer = rig.layers[1]
    num_padding = 0 if params == ENCODER else 2
    batch = rig.batch([(rig.sequence(5), 9), (rig.sequence(8), 3)], [], num_padding=2)
    num_keys = sum(keys) + (num_padding if params != CROSS else 0)
    query = rig.random(sum(queries) + num_padding, 64)
    key, value = rig.random(num_keys, 32), rig.random(num_keys, 32)
    output = layer(query, key, value, rig.cache.new_empty(0), rig.builder.build(batch))
    for first, count, first_key, num in zip(
        (0, queries[0]), queries, (0, keys[0]), keys, strict=True
    ):
        rows, key_rows = slice(first, first + count), slice(first_key, first_key + num)
        q, k, v = (t.unflatten(1, (-1, 16)) for t in (query[rows], key[key_rows], value[key_rows]))
        assert relative_error(output[rows], dense_attention(q, k, v, params).flatten(1)) < 1e-5
    assert (output[sum(queries) :] == 0).all()
    assert rig.cache.isnan().all()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_slopes_of_an_encoders_ranks_equal_the_whole(num_ranks: int) -> None:
    whole = params_of(8, 4, has_alibi=True, attention_type=AttentionType.ENCODER_ONLY)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, heads, 16, generator=generator) for heads in (8, 4, 4))
    outputs = []
    for rank in range(num_ranks):
        part = whole.shard(rank, num_ranks)
        rig = Rig(part)
        mine = [t.chunk(num_ranks, dim=1)[rank] for t in (q, k, v)]
        tokens = torch.cat(mine, dim=1).flatten(1)
        outputs.append(rig.step(prefills=[(rig.sequence(), 9)], tokens=[tokens])[0])
    result = torch.cat([output.unflatten(1, (-1, 16)) for output in outputs], dim=1)
    assert relative_error(result, dense_attention(q, k, v, whole)) < 1e-5


def test_metadata_of_parts_and_of_the_next_step_have_an_encoder() -> None:
    rig = model_rig()
    a, b = rig.sequence(7), rig.sequence(3)
    rig.step(prefills=[(a, 6)])
    whole = rig.builder.build(rig.batch([(b, 2)], [a]))
    assert whole.prefill_metadata is not None
    assert whole.decode_metadata is not None
    prefills, decodes = whole.prefill_metadata.batch, whole.decode_metadata.batch
    assert prefills.encoder is not None
    assert decodes.encoder is not None
    assert len(prefills.encoder.slot_mapping) == 3
    assert decodes.encoder.seq_lens.tolist() == [7]
    query = rig.random(1, 64)
    advanced = whole.decode_metadata.advance_step()
    output = rig.layers[3](query, None, None, rig.cache, advanced)
    keys, values = a.keys[3], a.values[3]
    reference = dense_attention(query.unflatten(1, (-1, 16)), keys, values, CROSS).flatten(1)
    assert relative_error(output, reference) < 1e-5


def test_batch_without_an_encoder_batch_is_rejected() -> None:
    rig = model_rig()
    batch = rig.batch([(rig.sequence(3), 2)], [])
    with pytest.raises(ValueError, match="has no encoder batch"):
        rig.builder.build(replace(batch, encoder=None))


def test_part_of_an_encoder_is_rejected() -> None:
    rig = Rig(params_of(attention_type=AttentionType.ENCODER_ONLY))
    sequence = rig.sequence()
    sequence.length = 4
    with pytest.raises(ValueError, match="has 7 tokens, and the step computes 3"):
        rig.builder.build(rig.batch([(sequence, 3)], []))
