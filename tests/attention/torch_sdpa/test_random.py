"""Random layers under random steps, against the dense reference."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attention.abstract import AttentionParams, AttentionType
from tests.attention.rig import Rig, RigSequence, params_of

pytestmark = pytest.mark.usefixtures("both_decodes")


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
    max_examples=60,
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
