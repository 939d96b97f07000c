"""Every backend on a GPU against the dense reference, with replays of graphs and without waiting.

Which cases a backend runs depends on what its kernels distinguish and how long they compile.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from typing import cast

import pytest
import torch

from attention.abstract import AttentionBackend, AttentionBatch, AttentionParams, AttentionType
from attention.cpu.torch_sdpa import TorchSDPABackend
from attention.gpu.backend import GpuBackend
from attention.selector import (
    FlashInferBackend,
    HybridBackend,
    TorchSDPAGpuBackend,
    XFormersBackend,
)
from tests.attention.dense_reference import relative_error
from tests.attention.gpu_steps import (
    BLOCK_SIZES,
    FEATURES,
    HEAD_COUNTS,
    HEAD_SIZES,
    NEEDS_GPU,
    check_replays,
    check_waits_for_nothing,
    gpu_rig,
    heads_of,
    run_steps,
)
from tests.attention.rig import TOLERANCE, Rig, params_of

pytestmark = NEEDS_GPU

CROSS_TYPES = AttentionType.ENCODER, AttentionType.DECODER, AttentionType.ENCODER_DECODER
BFLOAT, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Covered:
    """A backend, and which cases cover it; features are named as in `FEATURES`."""

    backend: type[GpuBackend]
    dtypes: tuple[torch.dtype, ...]
    """With every feature."""
    head_layers: tuple[tuple[str, ...], ...]
    """Layers of one model, with every head size."""
    head_dtypes: tuple[torch.dtype, ...] = (BFLOAT,)
    head_count_layers: tuple[tuple[str, ...], ...]
    """Layers of one model, with every ratio of query heads to KV heads."""
    head_count_dtypes: tuple[torch.dtype, ...]
    head_count_size: int = 64
    block_features: tuple[str, ...] = ("plain", "window", "e5m2")
    encoder_dtypes: tuple[torch.dtype, ...] = (BFLOAT,)
    encoder_features: tuple[str, ...] = ("plain", "window", "alibi")
    replays: tuple[tuple[tuple[str, ...], torch.dtype, int], ...]
    """Layers, dtype and block size of each."""
    unwaiting: tuple[str, ...] = ("plain", "window", "cap", "sinks")


COVERED = (
    Covered(
        backend=FlashInferBackend,
        dtypes=(BFLOAT, HALF),
        head_layers=(("plain", "alibi"),),
        head_count_layers=(("plain",), ("window",), ("alibi",), ("e4m3",)),
        head_count_dtypes=(BFLOAT,),
        head_count_size=128,
        block_features=("plain", "window", "window+cap", "e5m2"),
        replays=(
            *(
                ((feature, "plain"), BFLOAT, block_size)
                for feature in ("plain", "window", "window+cap", "alibi")
                for block_size in BLOCK_SIZES
            ),
            (("e4m3", "e4m3"), BFLOAT, 16),
            (("e5m2", "e5m2"), BFLOAT, 16),
        ),
        unwaiting=("plain", "window", "cap", "alibi", "sinks"),
    ),
    # Both of its halves are covered by other backends.
    Covered(
        backend=HybridBackend,
        dtypes=(BFLOAT,),
        head_layers=(("plain", "alibi"),),
        head_count_layers=(("plain",),),
        head_count_dtypes=(BFLOAT,),
        head_count_size=128,
        block_features=("plain",),
        replays=(
            (("plain", "window+cap"), BFLOAT, 16),
            (("alibi", "plain"), BFLOAT, 64),
            (("window+sinks", "sinks"), BFLOAT, 64),
            (("e4m3", "e4m3"), BFLOAT, 16),
        ),
    ),
    Covered(
        backend=XFormersBackend,
        dtypes=(BFLOAT, HALF),
        head_layers=(("plain",), ("window",), ("alibi",), ("e4m3",)),
        head_count_layers=(("plain",), ("window",), ("cap",)),
        head_count_dtypes=(HALF,),
        encoder_features=("window", "alibi"),
        replays=tuple(
            ((feature, "plain"), BFLOAT, block_size)
            for feature in ("plain", "window", "cap", "alibi")
            for block_size in BLOCK_SIZES
        ),
    ),
    Covered(
        backend=TorchSDPAGpuBackend,
        dtypes=(BFLOAT, HALF, FLOAT),
        head_layers=(("plain", "window+cap", "alibi"),),
        head_dtypes=(BFLOAT, FLOAT),
        head_count_layers=(("plain", "window", "alibi"),),
        head_count_dtypes=(HALF, FLOAT),
        encoder_dtypes=(BFLOAT, HALF, FLOAT),
        replays=tuple(
            ((feature, feature), dtype, 16)
            for feature in ("plain", "window+cap", "alibi", "sinks", "e4m3")
            for dtype in (BFLOAT, FLOAT)
        ),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run of steps."""

    name: str
    layers: tuple[AttentionParams, ...]
    dtype: torch.dtype = BFLOAT
    block_size: int = 16
    is_grouped: bool = False
    backend: type[AttentionBackend] = TorchSDPABackend
    """Set by `over`."""

    def rig(self) -> Rig:
        """Return a rig with room for all steps."""
        return gpu_rig(
            *self.layers,
            backend=self.backend,
            dtype=self.dtype,
            block_size=self.block_size,
            is_grouped=self.is_grouped,
        )


def over(cases: Callable[[Covered], Iterator[Case]]) -> pytest.MarkDecorator:
    """Return a mark that runs a test for the cases of every backend."""
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(
                replace(case, backend=covered.backend),
                id=f"{covered.backend.get_name()}-{case.name}",
                marks=_needs_library(covered.backend),
            )
            for covered in COVERED
            for case in cases(covered)
        ],
    )


def _needs_library(backend: type[GpuBackend]) -> list[pytest.MarkDecorator]:
    absent = [name for name in backend.packages if find_spec(name) is None]
    return [pytest.mark.skipif(bool(absent), reason=f"needs {' and '.join(absent)}")]


def _all_features(covered: Covered) -> Iterator[Case]:
    for dtype, (name, params) in product(covered.dtypes, FEATURES.items()):
        yield Case(name=f"{name}-{_word(dtype)}", layers=(params,), dtype=dtype)


def _all_head_sizes(covered: Covered) -> Iterator[Case]:
    cases = product(enumerate(HEAD_SIZES), covered.head_layers, covered.head_dtypes)
    for (index, head_size), features, dtype in cases:
        yield Case(
            name=f"{head_size}-{'+'.join(features)}-{_word(dtype)}",
            layers=tuple(heads_of("3", head_size, feature) for feature in features),
            dtype=dtype,
            block_size=BLOCK_SIZES[index % len(BLOCK_SIZES)],
        )


def _all_head_counts(covered: Covered) -> Iterator[Case]:
    for heads, features, dtype in product(
        HEAD_COUNTS, covered.head_count_layers, covered.head_count_dtypes
    ):
        yield Case(
            name=f"{heads}-{'+'.join(features)}-{_word(dtype)}",
            layers=tuple(heads_of(heads, covered.head_count_size, name) for name in features),
            dtype=dtype,
            block_size=32,
        )


def _all_block_sizes(covered: Covered) -> Iterator[Case]:
    for block_size, feature in product((8, *BLOCK_SIZES, 128), covered.block_features):
        yield Case(
            name=f"{block_size}-{feature}", layers=(FEATURES[feature],), block_size=block_size
        )


def _all_of_encoders_and_decoders(covered: Covered) -> Iterator[Case]:
    for feature, dtype in product(("plain", "scale", "cap", "e4m3"), covered.encoder_dtypes):
        layers = (replace(FEATURES[feature], attention_type=kind) for kind in CROSS_TYPES)
        yield Case(name=f"{feature}-{_word(dtype)}", layers=tuple(layers), dtype=dtype)


def _all_of_encoders(covered: Covered) -> Iterator[Case]:
    for feature in covered.encoder_features:
        layer = replace(FEATURES[feature], attention_type=AttentionType.ENCODER_ONLY)
        yield Case(name=feature, layers=(layer,))


def _all_replays(covered: Covered) -> Iterator[Case]:
    for features, dtype, block_size in covered.replays:
        yield Case(
            name=f"{'+'.join(features)}-{_word(dtype)}-{block_size}",
            layers=tuple(FEATURES[feature] for feature in features),
            dtype=dtype,
            block_size=block_size,
        )


def _unwaiting(covered: Covered) -> Iterator[Case]:
    layers = tuple(FEATURES[feature] for feature in covered.unwaiting)
    yield Case(name="all", layers=layers)


def _replayed_cross_attention(covered: Covered) -> Iterator[Case]:
    layers = (replace(FEATURES["plain"], attention_type=kind) for kind in CROSS_TYPES[1:])
    yield Case(name="cross", layers=tuple(layers))


def _of_features(*features: str) -> Callable[[Covered], Iterator[Case]]:
    """Return one case of each backend, with a layer of each feature."""

    def cases(covered: Covered) -> Iterator[Case]:
        layers = tuple(FEATURES[feature] for feature in features)
        yield Case(name="+".join(features), layers=layers)

    return cases


GROUPED_LAYERS = (
    ("window", "plain"),
    ("window", "window", "plain", "window", "window+cap", "plain"),
    ("window+sinks", "sinks", "window+sinks", "window+sinks"),
    ("alibi", "window+alibi"),
    ("e4m3", "e4m3+window+cap"),
    ("window",),
)


def _grouped(covered: Covered) -> Iterator[Case]:
    """Return cases of layers in groups; those of two shapes come last."""
    for features in GROUPED_LAYERS:
        for block_size in BLOCK_SIZES[:2]:
            yield Case(
                name=f"{'+'.join(features)}-{block_size}",
                layers=tuple(FEATURES[feature] for feature in features),
                block_size=block_size,
                is_grouped=True,
            )
    wide = params_of(8, 4, 128, sliding_window=37)
    yield Case(name="shapes", layers=(wide, params_of(8, 2, 256), wide, wide), is_grouped=True)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@over(_all_features)
def test_every_feature_equals_the_dense_reference(case: Case) -> None:
    run_steps(case.rig())


@over(_all_head_sizes)
def test_every_head_size(case: Case) -> None:
    run_steps(case.rig())


@over(_all_head_counts)
def test_every_number_of_heads(case: Case) -> None:
    run_steps(case.rig())


@over(_all_block_sizes)
def test_every_block_size(case: Case) -> None:
    run_steps(case.rig())


@over(_all_of_encoders_and_decoders)
def test_encoder_and_cross_attention(case: Case) -> None:
    run_steps(case.rig())


@over(_all_of_encoders)
def test_encoder_alone(case: Case) -> None:
    rig = case.rig()
    for lengths in ((64, 64), (9, 9, 1), (150, 3, 64)):
        rig.step(prefills=[(rig.sequence(), n) for n in lengths], num_padding=2)


@over(_of_features("window", "plain", "window+cap", "plain", "alibi", "window+sinks", "sinks"))
def test_layers_with_and_without_window_alternate(case: Case) -> None:
    run_steps(case.rig())


@over(_grouped)
def test_groups_of_layers_equal_the_dense_reference(case: Case) -> None:
    rig = case.rig()
    run_steps(rig)
    # Far longer than the window, so that most blocks are freed and filled with NaN.
    a, b = rig.sequence(), rig.sequence()
    rig.step(prefills=[(a, 70), (b, 3)])
    rig.step(prefills=[(a, 90)], decodes=[b])
    for _ in range(3):
        rig.step(decodes=[a, b], num_padding=2)


@over(_grouped)
def test_replays_of_groups_of_layers_equal_eager_steps(case: Case) -> None:
    check_replays(
        case.backend,
        *case.layers,
        dtype=case.dtype,
        block_size=case.block_size,
        is_grouped=True,
    )


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@over(_of_features("plain", "window", "window", "sinks"))
def test_a_step_of_groups_does_not_synchronize_with_the_gpu(case: Case) -> None:
    check_waits_for_nothing(case.backend, *case.layers, dtype=case.dtype, is_grouped=True)


@over(_of_features("plain"))
def test_large_and_small_prompts_alternate(case: Case) -> None:
    rig = replace(case, layers=(params_of(32, 8, 128),), block_size=64).rig()
    a, b = rig.sequence(), rig.sequence()
    for _ in range(2):
        rig.step(prefills=[(a, 400), (b, 200)])
        rig.step(prefills=[(a, 5)], decodes=[b])


@over(_of_features("plain", "window"))
def test_nan_beyond_the_ragged_ends_of_rows_does_not_spread(case: Case) -> None:
    rig = replace(case, block_size=64).rig()
    sequences = [rig.sequence() for _ in range(7)]
    rig.step(prefills=[(s, 1 + 11 * i) for i, s in enumerate(sequences)])
    for _ in range(9):
        rig.step(decodes=sequences)


@pytest.mark.parametrize("feature", ["plain", "e4m3"])
@over(_of_features("plain"))
def test_prompts_of_a_profile_run_attend_among_themselves(case: Case, feature: str) -> None:
    rig = case.rig()
    batch = rig.batch([(rig.sequence(), 40), (rig.sequence(), 9)], [])
    inputs = rig.tokens(49)[0].cuda().split([1024, 256, 256], 1)
    expected = _run(rig, batch, inputs)
    profiled = replace(case, layers=(FEATURES[feature],)).rig()
    profiled.cache = torch.empty(0, dtype=profiled.cache.dtype, device="cuda")
    no_tables = replace(batch, block_tables=batch.block_tables[:, :0])
    assert torch.equal(_run(profiled, no_tables, inputs), expected)


@over(_of_features("plain", "window"))
def test_sequence_survives_a_swap_to_other_blocks(case: Case) -> None:
    rig = case.rig()
    sequence = rig.sequence()
    rig.step(prefills=[(sequence, 45)])
    host = torch.zeros_like(rig.cache[:3], device="cpu", pin_memory=True)
    order = [2, 0, 1]
    case.backend.swap_blocks(rig.cache, host, list(zip(sequence.blocks, order, strict=True)))
    torch.cuda.synchronize()
    rig.release(sequence)
    sequence.blocks = [rig.free.pop(0) for _ in order]
    case.backend.swap_blocks(host, rig.cache, list(zip(order, sequence.blocks, strict=True)))
    rig.step(decodes=[sequence])


@over(_of_features("plain", "window"))
def test_sequence_survives_a_copy_to_scattered_blocks(case: Case) -> None:
    rig = case.rig()
    sequence = rig.sequence()
    rig.step(prefills=[(sequence, 45)])
    blocks = [rig.free.pop(0) for _ in sequence.blocks]
    case.backend.copy_blocks(rig.cache, list(zip(sequence.blocks, blocks, strict=True)))
    rig.release(sequence)
    sequence.blocks = blocks
    rig.step(decodes=[sequence])


@pytest.mark.parametrize("is_grouped", [False, True])
@over(_of_features("plain", "window"))
def test_advanced_step_equals_one_that_is_uploaded(case: Case, is_grouped: bool) -> None:
    rig = replace(case, is_grouped=is_grouped).rig()
    a, b = rig.sequence(), rig.sequence()
    rig.step(prefills=[(a, 14), (b, 40)])
    batch = rig.batch([], [a, b])
    step = rig.builder.build(batch)
    for _ in range(4):
        inputs = rig.tokens(2)[0].cuda().split([1024, 256, 256], 1)
        outputs = [layer(*inputs, rig.cache, step) for layer in rig.layers]
        uploaded = rig.builder.alike().build(batch)
        for layer, out in zip(rig.layers, outputs, strict=True):
            expected = layer(*inputs, rig.cache, uploaded)
            assert relative_error(out.cpu(), expected.cpu()) < TOLERANCE[case.dtype]
        step, batch = step.advance_step(), batch.advanced(case.block_size)


@over(_all_replays)
def test_replays_equal_eager_steps(case: Case) -> None:
    check_replays(case.backend, *case.layers, dtype=case.dtype, block_size=case.block_size)


@over(_replayed_cross_attention)
def test_replays_of_cross_attention_equal_eager_steps(case: Case) -> None:
    check_replays(case.backend, *case.layers, dtype=case.dtype, block_size=case.block_size)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@over(_unwaiting)
def test_a_step_does_not_synchronize_with_the_gpu(case: Case) -> None:
    check_waits_for_nothing(case.backend, *case.layers, dtype=case.dtype)


@over(_of_features("plain"))
def test_plans_far_ahead_of_the_gpu_do_not_mix(case: Case) -> None:
    rig = case.rig()
    sequences = [rig.sequence() for _ in range(3)]
    rig.step(prefills=[(s, 30 + 40 * i) for i, s in enumerate(sequences)])
    inputs = rig.tokens(1)[0].cuda().split([1024, 256, 256], 1)
    batches = [rig.batch([], [s]) for s in sequences]
    expected = [_run(rig, batch, inputs) for batch in batches]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # The host plans all steps while the GPU is busy.
    ahead = [_run(rig, batch, inputs) for batch in batches]
    for out, reference in zip(ahead, expected, strict=True):
        assert torch.equal(out, reference)


def _run(rig: Rig, batch: AttentionBatch, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    query, key, value = inputs
    return cast(
        "torch.Tensor", rig.layers[0](query, key, value, rig.cache, rig.builder.build(batch))
    )
