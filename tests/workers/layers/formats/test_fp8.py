"""Weights in fp8: how they are loaded, cut and multiplied, against torch in float64."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from pagedray.errors import CheckpointError, DeviceError
from pagedray.weight_format import FormatRule, Fp8Format, Quantization
from tests.workers.layers.formats.layers import column_layer, loaded, row_layer
from tests.workers.lone_rank import LoneRank
from workers.layers.formats.fp8_linear import Fp8Linear
from workers.layers.formats.fp8_weight import Fp8Weight, quantized_rows
from workers.layers.formats.make_kernel import make_format_kernel
from workers.layers.weight import MatrixPart, Placement
from workers.parallel.group import SoloGroup

# Without a GPU the interpreter of Triton runs the kernels, and torch the product of the library.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
AT_LOAD = Fp8Format(is_made_at_load=True)


@pytest.fixture(autouse=True)
def _seed() -> None:
    # Of other weights, one in some thousands has a quotient so close to the middle of two values of
    # fp8 that torch rounds it differently from float64, as it does so through float32.
    torch.manual_seed(1)


def rounded(weight: torch.Tensor, num_parts: int = 1) -> torch.Tensor:
    """Return a weight with its values rounded to fp8, by rows of each of some parts of columns."""
    parts = []
    for part in weight.double().chunk(num_parts, 1):
        scale = part.abs().amax(1, keepdim=True) / 448
        parts.append((part / scale).to(torch.float8_e4m3fn).double() * scale)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_plain_rows_are_rounded_to_fp8_when_they_are_loaded(
    stored: torch.dtype, tmp_path: Path
) -> None:
    weights = {f"{name}.weight": torch.randn(12, 20).to(stored) for name in "ab"}
    save_file(weights, tmp_path / "model.safetensors")
    layer = loaded(column_layer({"a": 12, "b": 12}, 20, AT_LOAD), tmp_path)
    x = torch.randn(3, 20)
    exact = [functional.linear(x.double(), rounded(weight)) for weight in weights.values()]
    torch.testing.assert_close(layer(x).double(), torch.cat(exact, 1), rtol=1e-5, atol=1e-5)


def test_each_rank_scales_its_part_of_the_columns(tmp_path: Path) -> None:
    weight = torch.randn(10, 32) * torch.rand(32).exp2()
    save_file({"a.weight": weight}, tmp_path / "model.safetensors")
    x = torch.randn(3, 32)
    parts = [
        loaded(row_layer("a", 10, 32, AT_LOAD, LoneRank(rank, 2)), tmp_path)(
            x[:, 16 * rank :][:, :16]
        )
        for rank in range(2)
    ]
    exact = functional.linear(x.double(), rounded(weight, 2))
    torch.testing.assert_close((parts[0] + parts[1]).double(), exact, rtol=1e-5, atol=1e-5)


def test_a_weight_that_is_loaded_in_pieces_has_the_same_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.weights.load_weights._PIECE_BYTES", 1000)
    weight = torch.randn(70, 300)
    save_file({"a.weight": weight}, tmp_path / "model.safetensors")
    layer = loaded(column_layer({"a": 70}, 300, AT_LOAD), tmp_path, num_threads=3)
    x = torch.randn(2, 300)
    exact = functional.linear(x.double(), rounded(weight))
    torch.testing.assert_close(layer(x).double(), exact, rtol=1e-5, atol=1e-4)


def test_rows_stand_for_their_values_whatever_their_size() -> None:
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(9, 33, generator=generator)
    rows *= torch.logspace(-30, 30, 9).unsqueeze(1)
    rows[3] = 0.0
    rows[5, 1:] = 0.0
    values, scales = quantized_rows(rows)
    assert bool((scales > 0.0).logical_and(scales.isfinite()).all())
    exact = values.double() * scales
    largest = rows.double().abs().amax(1, keepdim=True)
    # Half of the last of three bits, or half of the smallest number.
    bound = rows.double().abs() * 2.0**-4 + largest / 448.0 * 2.0**-10
    assert bool(((exact - rows.double()).abs() <= bound).all())


def test_reordered_rows_keep_their_scales() -> None:
    stored = Fp8Weight(AT_LOAD, 6, 4, device=torch.device("cpu"))
    stored.values.copy_(torch.arange(24).view(6, 4))
    stored.scales.copy_(torch.arange(6)[:, None])
    before = stored.dequantized(torch.float32)
    order = torch.tensor([3, 1, 0, 5, 4, 2])
    stored.reorder(order)
    assert torch.equal(stored.dequantized(torch.float32), before[order])


@pytest.mark.parametrize(
    "format",
    [Fp8Format(scales="tensor"), Fp8Format(scales="block", block=(2, 4))],
    ids=["tensor", "block"],
)
def test_reordered_rows_keep_the_scales_of_their_tensors(format: Fp8Format) -> None:
    def filled() -> Fp8Weight:
        stored = Fp8Weight(format, 6, 4, device=torch.device("cpu"))
        for index, rows in enumerate((slice(0, 2), slice(2, 6))):
            height = rows.stop - rows.start
            part = (slice(0, height), slice(0, 4))
            source = MatrixPart(name=str(index), shape=(height, 4), part=part)
            for shard in stored.weight_shards(source, rows):
                numbers = torch.arange(1, 1 + shard.target.numel()).view(shard.target.shape)
                shard.target.copy_(numbers + index)
        return stored

    plain, reordered = filled(), filled()
    order = torch.tensor([3, 1, 0, 5, 4, 2])
    reordered.reorder(order)
    for stored in (plain, reordered):
        stored.finalize()
    expected = plain.dequantized(torch.float32)
    assert len(expected.unique()) > 12
    assert torch.equal(reordered.dequantized(torch.float32), expected[order])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_is_rejected(value: float, tmp_path: Path) -> None:
    weight = torch.randn(12, 20)
    weight[7, 3] = value
    save_file({"a.weight": weight}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor a.weight has 1 value that is NaN or inf"):
        loaded(column_layer({"a": 12}, 20, AT_LOAD), tmp_path)


@pytest.mark.parametrize("num_rows", [1, 16, 17, 120])
@pytest.mark.parametrize("has_bias", [False, True])
def test_few_rows_and_many_give_the_same_columns(num_rows: int, has_bias: bool) -> None:
    stored = Fp8Weight(AT_LOAD, 64, 256, device=DEVICE)
    stored.values.copy_(torch.randn(64, 256))
    stored.scales.copy_(torch.rand(64, 1) / 16)
    bias = torch.randn(64).to(torch.bfloat16).to(DEVICE) if has_bias else None
    kernel = Fp8Linear(stored, bias, name="a", device=DEVICE)
    kernel.finalize()
    # Whole numbers, the largest of which is that of fp8, need no rounding.
    x = torch.randint(-8, 9, (num_rows, 256)).to(torch.bfloat16).to(DEVICE)
    x[:, 3] = 448.0
    weight = stored.dequantized(torch.float64)
    exact = functional.linear(x.double(), weight, None if bias is None else bias.double())
    torch.testing.assert_close(kernel(x).double(), exact, rtol=1e-2, atol=2e-2)
    gate, other = exact.chunk(2, dim=1)
    gated = functional.silu(gate) * other
    torch.testing.assert_close(kernel.gated(x, "silu").double(), gated, rtol=4e-2, atol=0.5)


def test_sizes_that_the_library_cannot_multiply_are_rejected() -> None:
    stored = Fp8Weight(AT_LOAD, 24, 48, device=DEVICE)
    with pytest.raises(DeviceError, match=r"a has 48 inputs and 24 outputs .* multiples of 16"):
        Fp8Linear(stored, None, name="a", device=DEVICE)


@pytest.mark.parametrize(
    ("dtype", "capability", "message"),
    [
        (
            torch.bfloat16,
            (8, 0),
            "q_proj is in fp8, whose products need a GPU of compute capability 9.0 or later, but "
            "NVIDIA A100 has 8.0; use weights in bfloat16.",
        ),
        (torch.float16, (9, 0), "q_proj is in fp8, whose products need --dtype bfloat16 on a GPU."),
    ],
    ids=str,
)
def test_a_gpu_that_cannot_multiply_fp8_is_rejected_before_memory_is_taken(
    dtype: torch.dtype,
    capability: tuple[int, int],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA A100")
    quantization = Quantization(method="fp8", rules=(FormatRule(re.compile(""), AT_LOAD),))
    place = Placement(SoloGroup(), dtype, torch.device("cuda"), quantization)
    with pytest.raises(DeviceError) as caught:
        # The size would not fit any memory.
        make_format_kernel(["q_proj"], 2**40, 2**40, place, has_bias=True)
    assert str(caught.value) == message


def stored_fp8(out_size: int, in_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and scales of channels."""
    values = torch.randn(out_size, in_size).to(torch.float8_e4m3fn)
    return values, torch.rand(out_size, 1)


def test_layers_of_one_product_keep_their_own_scales(tmp_path: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    exact = []
    for name, size in {"a": 12, "b": 6}.items():
        values, _ = stored_fp8(size, 20)
        # As one number, and as a tensor of one.
        scale = torch.rand(()) if name == "a" else torch.rand(1)
        tensors |= {f"{name}.weight": values, f"{name}.weight_scale": scale}
        exact.append(values.double() * scale)
    save_file(tensors, tmp_path / "model.safetensors")
    x = torch.randn(3, 20)
    format = Fp8Format(scales="tensor")
    for rank in range(2):
        layer = loaded(column_layer({"a": 12, "b": 6}, 20, format, LoneRank(rank, 2)), tmp_path)
        weight = torch.cat([part.chunk(2)[rank] for part in exact])
        expected = functional.linear(x.double(), weight)
        torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)


def test_ranks_may_have_a_part_of_a_block_of_outputs(tmp_path: Path) -> None:
    values, _ = stored_fp8(24, 40)
    scales = torch.rand(3, 3)
    save_file({"a.weight": values, "a.weight_scale": scales}, tmp_path / "model.safetensors")
    spread = scales.repeat_interleave(10, 0)[:24].repeat_interleave(16, 1)[:, :40]
    exact = values.double() * spread
    x = torch.randn(3, 40)
    format = Fp8Format(scales="block", block=(10, 16))
    for rank in range(2):
        layer = loaded(column_layer({"a": 24}, 40, format, LoneRank(rank, 2)), tmp_path)
        expected = functional.linear(x.double(), exact.chunk(2)[rank])
        torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)


def test_the_largest_scale_of_inputs_is_that_of_the_product() -> None:
    format = Fp8Format(has_input_scale=True)
    stored = Fp8Weight(format, 6, 4, device=torch.device("cpu"))
    for name, rows, scale in (("a", slice(0, 4), 0.5), ("b", slice(4, 6), 0.25)):
        source = MatrixPart(name=name, shape=(rows.stop, 4), part=(slice(None), slice(None)))
        shards = {shard.name: shard.target for shard in stored.weight_shards(source, rows)}
        shards[f"{name}.input_scale"].fill_(scale)
    stored.finalize()
    assert stored.input_scale is not None
    assert stored.input_scale.tolist() == [0.5]


def drop_scale(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["a.weight_scale"]


def spoil_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors["a.weight_scale"][3] = torch.nan


def spoil_value(tensors: dict[str, torch.Tensor]) -> None:
    tensors["a.weight"].view(torch.uint8)[3, 4] = 0xFF


def reshape_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors["a.weight_scale"] = tensors["a.weight_scale"].view(1, -1)


def widen_values(tensors: dict[str, torch.Tensor]) -> None:
    tensors["a.weight"] = tensors["a.weight"].float()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop_scale, "tensor a.weight_scale is missing"),
        (spoil_scale, "tensor a.weight_scale has 1 value that is NaN or infinite"),
        (spoil_value, "tensor a.weight has 1 value that is NaN or infinite"),
        (reshape_scale, r"a.weight_scale has shape \[1, 12\], but config.json requires \[12, 1\]"),
        (widen_values, "a.weight has dtype F32; supported dtypes are F8_E4M3"),
    ],
)
def test_broken_tensors_are_named(
    spoil: Callable[[dict[str, torch.Tensor]], None], message: str, tmp_path: Path
) -> None:
    values, scales = stored_fp8(12, 20)
    tensors = {"a.weight": values, "a.weight_scale": scales}
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        loaded(column_layer({"a": 12}, 20, Fp8Format()), tmp_path)


def test_fp8_values_are_no_plain_weights(tmp_path: Path) -> None:
    values, _ = stored_fp8(12, 20)
    save_file({"a.weight": values}, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"a.weight has dtype F8_E4M3; supported dtypes are F64"
    ):
        loaded(column_layer({"a": 12}, 20, AT_LOAD), tmp_path)
