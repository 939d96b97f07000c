"""Layers against their plain definitions."""

import ctypes
import math
import re
import shutil
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from attention.kernels.arguments import SplitKPartials
from attention.kernels.cpu.packed_gemm import PackedGemm
from attention.kernels.cpu.token_rows import AddNorm, Gate, Rotate
from pagedray.model_config import RopeConfig
from pagedray.weight_format import (
    FormatRule,
    Fp8Format,
    Int4Format,
    Int8Format,
    Quantization,
    WeightFormat,
)
from workers.layers import linear_choice
from workers.layers.linear import ColumnParallelLinear, Columns, RowParallelLinear
from workers.layers.linear_choice import (
    OneDnnLinear,
    PackedGemmLinear,
    SharedLayoutLinear,
    linear_kernel_class,
    make_linear_kernel,
)
from workers.layers.linear_kernel import DenseLinear, LinearKernel
from workers.layers.norm import LayerNorm, OffsetRMSNorm, QKNorm, RMSNorm
from workers.layers.rope import RotaryEmbedding, inverse_frequencies
from workers.layers.weight import Placement
from workers.models.fused_norm import FusedNorm
from workers.parallel.group import SoloGroup
from workers.weights.load_weights import DummyTensors

CPU = torch.device("cpu")
STORED: dict[str, WeightFormat | None] = {
    "plain": None,
    "fp8": Fp8Format(is_made_at_load=True),
    "fp8-tensors": Fp8Format(scales="tensor"),
    "fp8-blocks": Fp8Format(scales="block", block=(16, 32)),
    "int8": Int8Format(),
    "int8-tensors": Int8Format(scales="tensor"),
    "int4": Int4Format(packing="compressed-tensors", group_size=32, has_zeros=False),
    "int4-minimums": Int4Format(packing="gguf", group_size=32, has_zeros=False, has_minimums=True),
    "gptq": Int4Format(packing="gptq", group_size=32, zero_offset=1),
    "gptq-8": Int4Format(packing="gptq", num_bits=8, group_size=32, zero_offset=1),
}
KINDS = [DenseLinear, OneDnnLinear, PackedGemmLinear, SharedLayoutLinear]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# Engines use these classes for bfloat16 on CPUs that have the instructions, and no others.
HAS_BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.fixture(autouse=True)
def _inference() -> None:
    torch.manual_seed(0)


def _near(result: torch.Tensor, exact: torch.Tensor) -> bool:
    error = (result.double() - exact.double()).norm() / exact.double().norm()
    return bool(error < TOLERANCE[result.dtype])


def _linear(
    kind: type[LinearKernel], size_out: int, num_rows: int, *, dtype: torch.dtype, has_bias: bool
) -> tuple[LinearKernel, torch.Tensor, torch.Tensor]:
    """Return a kernel with random weights, its input, and the exact output in float64."""
    if dtype == torch.bfloat16 and kind is not DenseLinear and not HAS_BFLOAT16:
        pytest.skip("oneDNN does not multiply bfloat16 on this CPU")
    kernel = kind.empty(size_out, 50, has_bias=has_bias, dtype=dtype, device=CPU)
    weight, bias, x = torch.randn(size_out, 50), torch.randn(size_out), torch.randn(num_rows, 50)
    kernel.weight.copy_(weight)
    if kernel.bias is not None:
        kernel.bias.copy_(bias)
    kernel.finalize()
    exact = functional.linear(
        x.to(dtype).double(),
        weight.to(dtype).double(),
        bias.to(dtype).double() if has_bias else None,
    )
    return kernel, x.to(dtype), exact


@pytest.mark.parametrize("num_rows", [1, 2, 8, 33])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_every_linear_kernel_agrees_with_torch(
    kind: type[LinearKernel], dtype: torch.dtype, has_bias: bool, num_rows: int
) -> None:
    kernel, x, exact = _linear(kind, 37, num_rows, dtype=dtype, has_bias=has_bias)
    assert _near(kernel(x), exact)
    written = torch.full_like(exact, torch.nan, dtype=dtype)
    kernel.write(x, written)
    assert _near(written, exact)


@pytest.mark.parametrize("num_rows", [1, 16, 17])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_kernel", [True, False])
@torch.inference_mode()
def test_gated_output_is_silu_of_one_half_times_the_other(
    has_kernel: bool,
    kind: type[LinearKernel],
    dtype: torch.dtype,
    has_bias: bool,
    num_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_kernel:
        monkeypatch.setattr(Gate, "make", lambda device: None)
    kernel, x, exact = _linear(kind, 74, num_rows, dtype=dtype, has_bias=has_bias)
    gate, other = exact.chunk(2, dim=1)
    assert _near(kernel.gated(x, "silu"), functional.silu(gate) * other)


@pytest.mark.parametrize("num_rows", [1, 17])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_product_is_added_to_the_stream_or_returned(
    kind: type[LinearKernel], dtype: torch.dtype, has_bias: bool, num_rows: int
) -> None:
    kernel, x, exact = _linear(kind, 37, num_rows, dtype=dtype, has_bias=has_bias)
    streams = torch.randn(num_rows + 2, 64).to(dtype)
    before = streams.clone()
    stream = streams[1:-1, :37]
    product = kernel.forward_residual(stream, x)
    assert not isinstance(product, SplitKPartials)
    # A bias would have to be added as well.
    assert (product is None) == (kind is DenseLinear and not has_bias)
    if product is None:
        assert _near(stream, before[1:-1, :37].double() + exact)
        stream.copy_(before[1:-1, :37])
    else:
        assert _near(product, exact)
    assert torch.equal(streams, before)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_linear_kernel_accepts_a_strided_weight(kind: type[LinearKernel]) -> None:
    table, x = torch.randn(37, 64), torch.randn(3, 50)
    kernel = kind(table[:, :50], None)
    kernel.finalize()
    assert _near(kernel(x), x.double() @ table[:, :50].double().t())


@pytest.mark.parametrize("kind", [PackedGemmLinear, SharedLayoutLinear])
@torch.inference_mode()
def test_without_a_compiler_onednn_is_used(
    kind: type[LinearKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedGemm, "make", lambda *_, **__: None)
    monkeypatch.setattr(PackedGemm, "over", lambda *_: None)
    weight, x = torch.randn(64, 50), torch.randn(3, 50)
    kernel = kind(weight.clone(), None)
    kernel.finalize()
    exact = x.double() @ weight.double().t()
    gate, other = exact.chunk(2, dim=1)
    assert _near(kernel(x), exact)
    assert _near(kernel.gated(x, "silu"), functional.silu(gate) * other)


@pytest.mark.parametrize("has_compiler", [False, True])
@torch.inference_mode()
def test_bfloat16_is_multiplied_where_onednn_does_not(
    has_compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr("torch.ops.mkldnn._reorder_linear_weight", None)
    monkeypatch.setattr(linear_choice, "_linear", None)
    if not has_compiler:
        monkeypatch.setattr(PackedGemm, "make", lambda *_, **__: None)
    weight, x = torch.randn(64, 50).bfloat16(), torch.randn(3, 50).bfloat16()
    kernel = PackedGemmLinear(weight.clone(), None)
    kernel.finalize()
    assert _near(kernel(x), x.double() @ weight.double().t())


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512" or shutil.which("cc") is None,
    reason="oneDNN may have another layout, and the kernel needs a compiler",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_few_rows_are_multiplied_in_the_memory_of_onednn(dtype: torch.dtype) -> None:
    kernel, x, exact = _linear(SharedLayoutLinear, 74, 16, dtype=dtype, has_bias=False)
    size = torch.ops.mkldnn._nbytes(kernel.weight)
    assert _near(kernel(x), exact)
    assert kernel(x).any()
    ctypes.memset(torch.ops.mkldnn.data_ptr(kernel.weight), 0, size)
    assert not kernel(x).any()
    assert not kernel.gated(x, "silu").any()


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512" or shutil.which("cc") is None,
    reason="oneDNN may have another layout, and the kernel needs a compiler",
)
@pytest.mark.parametrize(
    ("dtype", "has_amx", "few_rows"),
    [
        (torch.float32, True, 16),
        (torch.bfloat16, False, 12),
        (torch.bfloat16, True, 64),
    ],
    ids=str,
)
@torch.inference_mode()
def test_onednn_multiplies_more_than_a_few_rows(
    dtype: torch.dtype, has_amx: bool, few_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_choice, "has_amx", lambda: has_amx)
    kernel, x, _ = _linear(SharedLayoutLinear, 74, few_rows + 1, dtype=dtype, has_bias=False)
    monkeypatch.setattr(linear_choice, "_linear", None)
    assert kernel(x[:few_rows]).shape == (few_rows, 74)
    with pytest.raises(TypeError):
        kernel(x)


@pytest.mark.parametrize("kind", [PackedGemmLinear, SharedLayoutLinear])
@torch.inference_mode()
def test_a_tied_weight_stays(kind: type[LinearKernel]) -> None:
    table = torch.randn(37, 50)
    kept = table.clone()
    kind(table, None).finalize()
    assert torch.equal(table, kept)


@pytest.mark.parametrize(
    ("capability", "has_amx", "has_bfloat16", "kinds"),
    [
        ("AVX512", False, True, (PackedGemmLinear, PackedGemmLinear)),
        ("AVX512", True, True, (PackedGemmLinear, SharedLayoutLinear)),
        ("AVX2", False, True, (SharedLayoutLinear, SharedLayoutLinear)),
        ("AVX2", False, False, (SharedLayoutLinear, PackedGemmLinear)),
        ("DEFAULT", False, False, (SharedLayoutLinear, DenseLinear)),
    ],
)
def test_packed_gemm_is_chosen_where_no_library_is_faster(
    capability: str,
    has_amx: bool,
    has_bfloat16: bool,
    kinds: tuple[type[LinearKernel], type[LinearKernel]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: has_bfloat16)
    assert linear_kernel_class(torch.float32, CPU) is kinds[0]
    assert linear_kernel_class(torch.bfloat16, CPU) is kinds[1]


def test_the_choice_of_linear_kernel_is_fixed() -> None:
    assert linear_kernel_class(torch.float32, torch.device("cuda")) is DenseLinear
    chosen = {type(make_linear_kernel(4, 4, has_bias=False, dtype=torch.float32, device=CPU))}
    assert chosen == {linear_kernel_class(torch.float32, CPU)}


@pytest.mark.parametrize("eps", [1e-6, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 5, 2000])
@pytest.mark.parametrize("has_kernel", [True, False])
@torch.inference_mode()
def test_the_norm_of_the_residual_is_that_of_torch(
    has_kernel: bool,
    num_rows: int,
    dtype: torch.dtype,
    eps: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_kernel:
        monkeypatch.setattr(AddNorm, "make", lambda weight, eps: None)
    norm = RMSNorm("norm", 48, eps, Placement(SoloGroup(), dtype, CPU))
    add_norm = FusedNorm(norm)
    (shard,) = norm.weight_shards()
    shard.target.normal_()
    stream, delta = torch.randn(2, num_rows, 48).to(dtype)
    hidden = stream.clone()

    def exact(x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x.double(), (48,), shard.target.double(), eps)

    assert _near(norm(stream), exact(hidden))
    assert _near(add_norm(stream), exact(hidden))
    assert _near(add_norm(stream, delta), exact(hidden + delta))
    assert torch.equal(stream, hidden + delta)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_kernel", [True, False])
@torch.inference_mode()
def test_an_offset_norm_multiplies_by_one_plus_its_weight(
    has_kernel: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernel:
        monkeypatch.setattr(AddNorm, "make", lambda weight, eps: None)
    norm = OffsetRMSNorm("norm", 48, 1e-6, Placement(SoloGroup(), dtype, CPU))
    (shard,) = norm.weight_shards()
    shard.target.normal_()
    weight = shard.target.double()
    norm.finalize()
    stream, delta = torch.randn(2, 5, 48).to(dtype)
    total = stream + delta
    exact = functional.rms_norm(total.double(), (48,), 1.0 + weight, 1e-6)
    assert _near(FusedNorm(norm)(stream, delta), exact)
    assert torch.equal(stream, total)


@torch.inference_mode()
def test_an_offset_norm_rounds_once() -> None:
    norm = OffsetRMSNorm("norm", 48, 1e-6, Placement(SoloGroup(), torch.bfloat16, CPU))
    (shard,) = norm.weight_shards()
    # In bfloat16, one plus so small a weight is one.
    shard.target.fill_(1e-3)
    norm.finalize()
    stream = torch.randn(50, 48).bfloat16()
    nearest = functional.rms_norm(stream.double(), (48,)).mul_(1.001).bfloat16()
    assert (norm(stream) == nearest).double().mean() > 0.98


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_layer_norm_adds_to_the_stream_first(dtype: torch.dtype, has_bias: bool) -> None:
    norm = LayerNorm("norm", 48, 1e-5, Placement(SoloGroup(), dtype, CPU), has_bias=has_bias)
    shards = {shard.name: shard.target.normal_().double() for shard in norm.weight_shards()}
    assert set(shards) == {"norm.weight", "norm.bias"} if has_bias else {"norm.weight"}
    stream, delta = torch.randn(2, 5, 48).to(dtype)
    total = stream + delta
    exact = functional.layer_norm(
        total.double(), (48,), shards["norm.weight"], shards.get("norm.bias"), 1e-5
    )
    assert _near(FusedNorm(norm)(stream, delta), exact)
    assert torch.equal(stream, total)


@pytest.mark.parametrize("has_offset", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_heads_of_queries_and_keys_have_weights_of_their_own(
    dtype: torch.dtype, has_offset: bool
) -> None:
    norm = QKNorm(
        ("q", "k"),
        6,
        1e-6,
        Placement(SoloGroup(), dtype, CPU),
        num_heads=2,
        num_kv_heads=1,
        has_offset=has_offset,
    )
    query, key = (shard.target.normal_().double() for shard in norm.weight_shards())
    norm.finalize()
    heads = torch.randn(4, 3, 6).to(dtype)
    weights = torch.stack((query, query, key)) + (1.0 if has_offset else 0.0)
    exact = functional.rms_norm(heads.double(), (6,), None, 1e-6) * weights
    result = norm(heads)
    assert result.dtype == dtype
    assert _near(result, exact)


@torch.inference_mode()
def test_the_norm_of_zeros_is_zero() -> None:
    norm = RMSNorm("norm", 8, 1e-6, Placement(SoloGroup(), torch.float32, CPU))
    next(norm.weight_shards()).target.fill_(1.0)
    assert torch.equal(norm(torch.zeros(2, 8)), torch.zeros(2, 8))


@torch.inference_mode()
def test_the_norm_of_no_rows_is_no_rows() -> None:
    norm = RMSNorm("norm", 8, 1e-6, Placement(SoloGroup(), torch.float32, CPU))
    assert norm(torch.empty(0, 8)).shape == (0, 8)


def rotary_embedding(rope: RopeConfig, head_size: int) -> RotaryEmbedding:
    """Return the embedding of 50 positions, for two heads of queries and others of keys."""
    return RotaryEmbedding(
        rope,
        head_size=head_size,
        num_query_heads=2,
        max_positions=50,
        dtype=torch.float32,
        device=CPU,
    )


@pytest.mark.parametrize("has_kernel", [True, False])
@torch.inference_mode()
def test_rotation_rotates_pairs_by_position_times_frequency(
    has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernel:
        monkeypatch.setattr(Rotate, "make", lambda table, dtype: None)
    rope = rotary_embedding(RopeConfig(theta=100.0), 6)
    heads, positions = torch.randn(2, 3, 6), torch.tensor([0, 41])
    # Heads are parts of wider rows, whose other values must not change.
    rows = torch.cat((heads.flatten(1), torch.ones(2, 4)), dim=1)
    rotated = rope.rotation_at(positions)(rows.narrow(1, 0, 18).unflatten(1, (3, 6)))
    assert torch.equal(rows[:, 18:], torch.ones(2, 4))
    frequencies = 100.0 ** (-torch.arange(0, 6, 2) / 6)
    angles = positions[:, None, None] * frequencies
    pairs = torch.complex(heads[..., :3], heads[..., 3:]) * torch.polar(
        torch.ones_like(angles), angles
    )
    torch.testing.assert_close(rotated, torch.cat((pairs.real, pairs.imag), dim=-1))
    assert torch.equal(rotated[0], heads[0])


@pytest.mark.parametrize("has_kernel", [True, False])
@torch.inference_mode()
def test_a_partial_rotation_leaves_the_rest_of_a_head(
    has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernel:
        monkeypatch.setattr(Rotate, "make", lambda table, dtype: None)

    def rotated(heads: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
        embedding = rotary_embedding(rope, heads.shape[2])
        return embedding.rotation_at(torch.tensor([0, 41]))(heads.clone())

    heads = torch.randn(2, 3, 10)
    result = rotated(heads, RopeConfig(rotary_size=6))
    assert torch.equal(result[..., 6:], heads[..., 6:])
    torch.testing.assert_close(result[..., :6], rotated(heads[..., :6], RopeConfig()))


def test_longrope_divides_each_frequency_by_its_factor_and_lengthens_heads() -> None:
    rope = RopeConfig(kind="longrope", theta=100.0, pair_factors=(1.0, 2.0, 5.0), magnitude=1.5)
    expected = inverse_frequencies(RopeConfig(theta=100.0), 6) / torch.tensor([1.0, 2.0, 5.0])
    torch.testing.assert_close(inverse_frequencies(rope, 6), expected)
    embedding = rotary_embedding(rope, 6)
    heads = torch.randn(1, 2, 6)
    torch.testing.assert_close(embedding.rotation_at(torch.tensor([0]))(heads.clone()), 1.5 * heads)


@pytest.mark.parametrize("has_kernel", [True, False])
@torch.inference_mode()
def test_queries_grow_with_each_original_length_and_keys_do_not(
    has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernel:
        monkeypatch.setattr(Rotate, "make", lambda table, dtype: None)
    rope = RopeConfig(original_max_positions=10)
    heads, positions = torch.randn(3, 5, 6), torch.tensor([9, 10, 49])
    plain = rotary_embedding(rope, 6).rotation_at(positions)(heads.clone())
    growing = rotary_embedding(replace(rope, query_growth=0.5), 6)
    result = growing.rotation_at(positions)(heads.clone())
    assert torch.equal(result[:, 2:], plain[:, 2:])
    factors = torch.tensor([1.0, 1 + 0.5 * math.log(2), 1 + 0.5 * math.log(5)])
    torch.testing.assert_close(result[:, :2], plain[:, :2] * factors[:, None, None])


@pytest.mark.parametrize("name", STORED)
def test_weights_of_all_formats_are_multiplied_when_they_are_loaded(name: str) -> None:
    format = STORED[name]
    rules = () if format is None else (FormatRule(re.compile(""), format),)
    place = Placement(SoloGroup(), torch.float32, CPU, Quantization(method="test", rules=rules))

    def filled(layer: ColumnParallelLinear | RowParallelLinear) -> torch.Tensor:
        for shard in layer.weight_shards():
            DummyTensors(1).fill_shard(shard)
        layer.finalize()
        return layer(x)

    def columns(scales: tuple[float, float], input_scale: float) -> torch.Tensor:
        parts = [
            Columns(name=name, total=size, part=slice(0, size), scale=scale)
            for name, size, scale in zip("ab", (64, 32), scales, strict=True)
        ]
        return filled(
            ColumnParallelLinear(64, parts, place, has_bias=True, input_scale=input_scale)
        )

    def row(scale: float) -> torch.Tensor:
        return filled(RowParallelLinear("c", 64, 32, place, has_bias=True, scale=scale))

    x = torch.randn(3, 64)
    found, rows = columns((0.25, 3.0), 0.7), row(1.7)
    assert _near(rows, 1.7 * row(1.0))
    x = 0.7 * x
    factors = torch.tensor([0.25] * 64 + [3.0] * 32)
    plain = columns((1.0, 1.0), 1.0)
    assert _near(found, factors * plain)
    assert not _near(found, plain)
