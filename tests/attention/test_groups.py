"""Layers in groups with block tables of their own: no backend reads a block behind the window."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from attention.abstract import AttentionParams
from attention.cpu.torch_sdpa import TorchSDPABackend
from attention.gpu.decode_schedule import DecodeDivision
from pagedray.layout import CacheGroup, CacheLayout
from tests.attention.gpu_steps import check_graph_inputs
from tests.attention.rig import Rig, params_of

FULL = params_of(has_sinks=True)
NARROW = params_of(sliding_window=6, has_sinks=True)
LARGE = params_of(3, 1, 64)
WIDE = params_of(sliding_window=11, soft_cap=2.0)


def layout_of(*groups: tuple[int | None, tuple[int, ...]], block_size: int = 4) -> CacheLayout:
    """Return a layout of groups with these windows and layers."""
    return CacheLayout(block_size, tuple(CacheGroup(layers, window) for window, layers in groups))


LAYOUTS: dict[str, tuple[tuple[AttentionParams, ...], CacheLayout]] = {
    "one window": ((NARROW, NARROW), layout_of((6, (0, 1)))),
    "alternating": ((NARROW, FULL, NARROW, FULL), layout_of((None, (1, 3)), (6, (0, 2)))),
    "unused places": (
        (NARROW, FULL, NARROW, WIDE, NARROW, FULL),
        layout_of((6, (0, 2)), (None, (1, 5)), (11, (3,)), (6, (4,))),
    ),
    "two shapes": ((NARROW, LARGE, NARROW), layout_of((None, (1,)), (6, (0, 2)))),
    "unused bytes": (
        (NARROW, LARGE, NARROW, LARGE, NARROW, NARROW),
        layout_of((None, (1, 3)), (6, (0, 2, 4)), (6, (5,))),
    ),
}


def run_long_sequences(rig: Rig, num_decodes: int = 9) -> None:
    """Run chunks, decodes and forks over several times the windows; the rig checks each step."""
    a, b, c = rig.sequence(), rig.sequence(), rig.sequence()
    rig.step(prefills=[(a, 9), (b, 2)])
    rig.step(prefills=[(c, 25)], decodes=[a, b], num_padding=1)
    rig.step(prefills=[(b, 13), (a, 3)], decodes=[c])
    fork = rig.fork(c)
    rig.step(prefills=[(fork, 5), (c, 2)], decodes=[a])
    for _ in range(num_decodes):
        rig.step(decodes=[c, fork, a, b], num_padding=2)
    rig.release(c)
    rig.step(prefills=[(b, 7)], decodes=[fork])
    rig.step(prefills=[(rig.sequence(), 30)], decodes=[fork, a])


@pytest.mark.usefixtures("both_decodes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_groups_on_a_cpu_equal_the_dense_reference(name: str, dtype: torch.dtype) -> None:
    layers, layout = LAYOUTS[name]
    run_long_sequences(Rig(*layers, dtype=dtype, layout=layout))


@pytest.mark.usefixtures("both_decodes")
def test_groups_of_fp8_blocks_equal_the_dense_reference() -> None:
    layers, layout = LAYOUTS["alternating"]
    layers = tuple(
        replace(layer, kv_cache_dtype="fp8_e4m3", k_scale=0.037, v_scale=0.71) for layer in layers
    )
    run_long_sequences(Rig(*layers, dtype=torch.bfloat16, layout=layout))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("one window", "two shapes") else pytest.mark.slow)
        for name in LAYOUTS
    ],
)
def test_groups_of_the_shared_kernels_equal_the_dense_reference(name: str) -> None:
    run_long_sequences(shared_rig(name), num_decodes=2)


@pytest.mark.parametrize("name", ["one window", "two shapes"])
def test_graph_inputs_of_groups_follow_each_step(name: str) -> None:
    rig = shared_rig(name)
    check_graph_inputs(rig, rig.backend)


def test_advanced_steps_of_groups_equal_steps_that_are_uploaded() -> None:
    rig = shared_rig("alternating")
    a, b = rig.sequence(), rig.sequence()
    rig.step(prefills=[(a, 3), (b, 14)])
    batch = rig.batch([], [a, b])
    step = rig.builder.build(batch)
    step.prepare_step()
    for _ in range(3):
        step, batch = step.advance_step(), batch.advanced(rig.spec.block_size)
        uploaded = rig.builder.alike().build(batch).prepare_step()
        for ours, theirs in zip(step.prepare_step().groups, uploaded.groups, strict=True):
            assert ours.slot_mapping.tolist() == theirs.slot_mapping.tolist()
            assert ours.decodes is not None
            assert theirs.decodes is not None
            assert ours.decodes.seq_lens.tolist() == theirs.decodes.seq_lens.tolist()
            assert ours.decodes.host_seq_lens.tolist() == theirs.decodes.host_seq_lens.tolist()


def test_groups_of_one_window_share_the_schedule_of_their_decodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    divided: list[int | None] = []
    items = DecodeDivision.items

    def counted(division: DecodeDivision, *arguments: Any) -> Any:  # Any: of the method
        divided.append(division.window)
        return items(division, *arguments)

    monkeypatch.setattr(DecodeDivision, "items", counted)
    rig = shared_rig("unused places")
    a, b = rig.sequence(), rig.sequence()
    for _ in range(2):
        rig.builder.build(rig.batch([], [a, b])).prepare_step()
        rig.advance(a)
        rig.advance(b)
    assert divided == 2 * [6, None, 11]


def shared_rig(name: str) -> Rig:
    """Return a rig of the shared kernels, interpreted without a GPU."""
    pytest.importorskip("triton")
    from tests.attention.shared_backend import SharedBackend

    layers, layout = LAYOUTS[name]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Rig(*layers, backend=SharedBackend, device=device, layout=layout)


def test_parts_of_a_step_equal_the_whole() -> None:
    layers, layout = LAYOUTS["alternating"]
    rig = Rig(*layers, layout=layout)
    a, b = rig.sequence(), rig.sequence()
    rig.step(prefills=[(a, 15)])
    metadata = rig.builder.build(rig.batch([(b, 4)], [a]))
    parts = metadata.prefill_metadata, metadata.decode_metadata
    for layer, rows in zip(rig.layers, rig.tokens(5), strict=True):
        query, key, value = rows.split([64, 32, 32], 1)
        whole = layer(query, key, value, rig.cache, metadata)
        outs = [
            layer(query[tokens], key[tokens], value[tokens], rig.cache, part)
            for part, tokens in zip(parts, (slice(4), slice(4, 5)), strict=True)
        ]
        assert torch.equal(torch.cat(outs), whole)


def test_layers_of_several_shapes_in_one_group_are_rejected() -> None:
    layout = layout_of((None, (0, 1)))
    spec = Rig.spec_of(FULL, LARGE, dtype=torch.float32, block_size=4, device="cpu")
    reasons = TorchSDPABackend.check(replace(spec, layout=layout))
    assert reasons == (
        "layers share the blocks of a cache, but differ in (num_kv_heads, head_size): "
        "[(1, 64), (2, 16)]",
    )


def test_profile_run_of_groups_attends_among_its_tokens() -> None:
    layers, layout = LAYOUTS["alternating"]
    rig = Rig(*layers, layout=layout)
    batch = rig.batch([(rig.sequence(), 9), (rig.sequence(), 3)], [])
    profile, stepped = (rig.builder.alike().build(batch) for _ in range(2))
    for layer, rows in zip(rig.layers, rig.tokens(12), strict=True):
        inputs = rows.split([64, 32, 32], 1)
        out = layer(*inputs, torch.empty(0), profile)
        torch.testing.assert_close(out, layer(*inputs, rig.cache, stepped), rtol=1e-5, atol=1e-5)
