"""The kernel of prompts, against attention in float64 over the keys and values of a sequence."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from attention.abstract import AttentionParams, AttentionType
from attention.kernels.cpu import instruction_set, paged_decode
from attention.kernels.cpu.paged_decode import PagedPrefill
from tests.attention.kernels.cpu.variants import compile_with, variants
from tests.attention.rig import Rig, params_of

LAYERS = [
    params_of(),
    params_of(2, 2, 40),
    params_of(6, 2, 72),
    params_of(2, 1, 256),
    params_of(65, 1, 16),
    params_of(sliding_window=1),
    params_of(sliding_window=33),
    params_of(sliding_window=70, has_sinks=True),
    params_of(soft_cap=0.7),
    params_of(has_alibi=True),
    params_of(has_alibi=True, sliding_window=20, soft_cap=3.0, has_sinks=True),
    params_of(fp8="fp8_e4m3"),
    params_of(6, 3, 40, fp8="fp8_e5m2", sliding_window=9),
]


DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(
    scope="module", autouse=True, params=["", *variants("-DEMULATE_AMX", "-mno-avx512f")]
)
def uses_amx(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Use the kernels of this machine, those of AMX in plain C, or those of AVX2."""
    with pytest.MonkeyPatch.context() as patch:
        has_amx = "-DEMULATE_AMX" in request.param or (
            not request.param and instruction_set.has_amx()
        )
        if request.param:
            compile_with(patch, request.param)
            patch.setattr(
                paged_decode, "_prefill_library", cache(paged_decode._prefill_library.__wrapped__)
            )
            patch.setattr(paged_decode, "has_amx", lambda: has_amx)
            library = paged_decode._prefill_library(
                "paged_prefill_amx.c" if has_amx else "paged_decode.c"
            )
            if not hasattr(library, "paged_prefill_bfloat"):
                pytest.skip(f"{request.param} is not for this machine")
        yield has_amx


def rig_of(params: AttentionParams, dtype: torch.dtype = torch.float32) -> Rig:
    """Return a rig whose prompts go to the kernel."""
    rig = Rig(params, dtype=dtype, block_size=16)
    if PagedPrefill.make(params, rig.spec) is None:
        pytest.skip("needs AVX2 and a C compiler")
    return rig


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("params", LAYERS, ids=repr)
def test_prompts_and_parts_of_prompts_attend_as_defined(
    params: AttentionParams, dtype: torch.dtype
) -> None:
    rig = rig_of(params, dtype)
    a, b, c, d = (rig.sequence() for _ in range(4))
    rig.step(prefills=[(a, 97), (b, 1), (c, 33)])
    rig.step(prefills=[(a, 64), (d, 32), (b, 30)], decodes=[c], num_padding=2)
    rig.step(prefills=[(b, 1), (d, 31), (a, 5)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("params", LAYERS[::2], ids=repr)
def test_tokens_have_the_same_bits_however_their_prompt_is_divided(
    params: AttentionParams, dtype: torch.dtype
) -> None:
    rig = rig_of(params, dtype)
    (tokens,) = rig.tokens(150)
    (whole,) = rig.step(prefills=[(rig.sequence(), 150)], tokens=[tokens])
    divided, start = rig.sequence(), 0
    for count in (1, 40, 23, 86):
        part = tokens[start : start + count]
        (out,) = rig.step(prefills=[(divided, count)], tokens=[part])
        assert torch.equal(out, whole[start : start + count])
        start += count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_after_a_query_do_not_change_its_result(dtype: torch.dtype) -> None:
    rig = rig_of(params_of(), dtype)
    (tokens,) = rig.tokens(60)
    (expected,) = rig.step(prefills=[(rig.sequence(), 60)], tokens=[tokens])
    tokens[30:] = torch.finfo(torch.float32).max / 1e4
    sequence = rig.sequence()
    metadata = rig.builder.build(rig.batch([(sequence, 60)], []))
    parts = tokens.split([64, 32, 32], 1)
    assert torch.equal(rig.layers[0](*parts, rig.cache, metadata)[:30], expected[:30])


@pytest.mark.parametrize("place", [5, 31, 32, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_key_that_is_not_finite_reaches_all_queries_that_see_it(
    dtype: torch.dtype, place: int
) -> None:
    rig = rig_of(params_of(sliding_window=8), dtype)
    query, key, value = rig.tokens(60)[0].split([64, 32, 32], 1)
    key[place] = float("nan")
    metadata = rig.builder.build(rig.batch([(rig.sequence(), 60)], []))
    out = rig.layers[0](query, key, value, rig.cache, metadata)
    broken = out.isnan().any(1).nonzero().flatten().tolist()
    assert broken == list(range(place, place + 8))


@pytest.mark.parametrize("fp8", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_before_the_window_of_all_queries_are_not_read(dtype: torch.dtype, fp8: str) -> None:
    rig = rig_of(params_of(sliding_window=20, fp8=fp8), dtype)
    sequence = rig.sequence()
    rig.step(prefills=[(sequence, 50)])
    # Queries from position 50 on see keys from 31 on; their block has more, 16 of which are kept.
    rig.cache[sequence.blocks[0]] = rig.nan
    rig.cache[sequence.blocks[1], ..., :15, :, :] = rig.nan
    rig.step(prefills=[(sequence, 40)])


def test_bfloat16_attends_with_amx(uses_amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not uses_amx:
        pytest.skip("needs AMX, or its emulation")
    source = "paged_prefill_amx.c"
    monkeypatch.setattr(
        paged_decode, "_prefill_library", {source: paged_decode._prefill_library(source)}.get
    )
    params = params_of()
    for dtype, is_found in ((torch.bfloat16, True), (torch.float32, False)):
        spec = Rig(params, dtype=dtype, block_size=16).spec
        assert (PagedPrefill.make(params, spec) is not None) == is_found


def test_there_is_none_without_avx2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of(params_of())
    compile_with(monkeypatch, "-O1 -mno-avx2", tmp_path)
    monkeypatch.setattr(paged_decode, "_prefill_library", paged_decode._prefill_library.__wrapped__)
    assert PagedPrefill.make(rig.spec.layers[0], rig.spec) is None
    assert list(tmp_path.rglob("paged_prefill-*.so"))


def test_an_encoder_has_no_such_kernel() -> None:
    params = replace(params_of(), attention_type=AttentionType.ENCODER_DECODER)
    assert PagedPrefill.make(params, rig_of(params_of()).spec) is None
