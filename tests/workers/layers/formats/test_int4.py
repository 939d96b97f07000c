"""Weights of four bits: how each format packs and cuts them, against torch in float64."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from pagedray.errors import CheckpointError
from pagedray.model_config import ExpertsConfig
from pagedray.weight_format import Fp8Format, Int4Format
from tests.small_models.int4_tensors import Int4Tensors
from tests.workers.layers.formats.layers import column_layer, loaded, row_layer
from tests.workers.lone_rank import LoneRank
from workers.layers.expert_product import ExpertPart, Mxfp4Experts
from workers.layers.formats.fp8_linear import Fp8Linear
from workers.layers.formats.fp8_weight import Fp8Weight
from workers.layers.formats.int4_linear import GpuInt4Linear
from workers.layers.formats.int4_weight import Int4Weight
from workers.layers.weight import MatrixPart
from workers.weights.checkpoint import Checkpoint
from workers.weights.load_weights import fill_shards

FORMATS = {
    "symmetric": Int4Format(packing="compressed-tensors", group_size=32, has_zeros=False),
    "asymmetric": Int4Format(packing="compressed-tensors", group_size=32),
    "channels": Int4Format(packing="compressed-tensors", group_size=None),
    "gptq": Int4Format(packing="gptq", group_size=32, zero_offset=1),
    "gptq-v2": Int4Format(packing="gptq", group_size=None),
    "gptq-ordered": Int4Format(packing="gptq", group_size=32, is_ordered=True),
    "gptq-8": Int4Format(packing="gptq", num_bits=8, group_size=32, zero_offset=1),
    "gptq-8-channels": Int4Format(packing="gptq", num_bits=8, group_size=None),
    "gptq-8-ordered": Int4Format(packing="gptq", num_bits=8, group_size=32, is_ordered=True),
    "awq": Int4Format(packing="awq", group_size=32),
}
CUT = [name for name in FORMATS if not name.endswith("ordered")]
# Without a GPU, Triton's interpreter is there.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-5 if found.dtype == torch.float32 else 1e-2
    error = (found.double() - expected).norm() / expected.norm()
    assert float(error) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_layers_of_one_product_are_dequantized(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    format = FORMATS[name]
    first, second = (Int4Tensors.random(size, 128, format) for size in (64, 32))
    save_file(first.stored("a") | second.stored("b"), tmp_path / "model.safetensors")
    layer = loaded(column_layer({"a": 64, "b": 32}, 128, format, dtype=dtype), tmp_path)
    exact = torch.cat((first.exact, second.exact))
    for num_rows in (1, 5, 100):
        x = torch.randn(num_rows, 128).to(dtype)
        assert_near(layer(x), functional.linear(x.double(), exact))


@pytest.mark.parametrize("name", CUT)
def test_each_rank_has_its_part(name: str, tmp_path: Path) -> None:
    format = FORMATS[name]
    tensors = Int4Tensors.random(32, 128, format)
    save_file(tensors.stored("a"), tmp_path / "model.safetensors")
    x = torch.randn(3, 128)
    exact = functional.linear(x.double(), tensors.exact)
    columns, sums = [], []
    for rank in range(2):
        columns.append(loaded(column_layer({"a": 32}, 128, format, LoneRank(rank, 2)), tmp_path)(x))
        row = loaded(row_layer("a", 32, 128, format, LoneRank(rank, 2)), tmp_path)
        sums.append(row(x[:, 64 * rank :][:, :64]))
    assert_near(torch.cat(columns, 1), exact)
    assert_near(sums[0] + sums[1], exact)


def test_a_zero_of_eight_bits_that_is_stored_less_one_wraps(tmp_path: Path) -> None:
    format = FORMATS["gptq-8"]
    tensors = Int4Tensors.random(64, 128, format)
    tensors.zeros[:, 0] = 0
    stored = tensors.stored("a")
    save_file(stored, tmp_path / "model.safetensors")
    layer = loaded(column_layer({"a": 64}, 128, format), tmp_path)
    x = torch.randn(3, 128)
    assert_near(layer(x), functional.linear(x.double(), tensors.exact))


def test_parts_that_cut_words_are_rejected() -> None:
    layer = column_layer({"a": 36}, 128, FORMATS["awq"], LoneRank(0, 2))
    with pytest.raises(CheckpointError, match=r"a has 18 outputs and 128 inputs .* multiples of 8"):
        list(layer.weight_shards())


def test_parts_that_cut_groups_are_rejected() -> None:
    layer = row_layer("a", 32, 96, FORMATS["awq"], LoneRank(0, 2))
    with pytest.raises(CheckpointError, match=r"a has 32 outputs and 48 inputs .* of 32"):
        list(layer.weight_shards())


def test_layers_of_one_product_need_the_same_order(tmp_path: Path) -> None:
    format = FORMATS["gptq-ordered"]
    first = Int4Tensors.random(64, 128, format).stored("a")
    second = Int4Tensors.random(64, 128, format).stored("b")
    second["b.g_idx"] = first["a.g_idx"].roll(1)
    save_file(first | second, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="a and b have different g_idx"):
        loaded(column_layer({"a": 64, "b": 64}, 128, format), tmp_path)


def test_groups_of_other_sizes_are_rejected(tmp_path: Path) -> None:
    format = FORMATS["gptq"]
    tensors = Int4Tensors.random(64, 128, format).stored("a")
    tensors["a.g_idx"][:3] = 2
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.g_idx must have 32 inputs of each group"):
        loaded(column_layer({"a": 64}, 128, format), tmp_path)


def test_a_scale_that_is_not_finite_is_named(tmp_path: Path) -> None:
    tensors = Int4Tensors.random(64, 128, FORMATS["awq"]).stored("a")
    tensors["a.scales"][2, 3] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor a\.scales has 1 value that is NaN or inf"):
        loaded(column_layer({"a": 64}, 128, FORMATS["awq"]), tmp_path)


def test_fp8_has_a_byte_for_each_number_and_scales_in_float32() -> None:
    for format, num_scales in (
        (Fp8Format(is_made_at_load=True), 64),
        (Fp8Format(scales="block", block=(16, 32)), 64 * 4),
    ):
        stored = Fp8Weight(format, 64, 128, device=DEVICE)
        bias = torch.zeros(64, dtype=torch.bfloat16, device=DEVICE)
        work = Fp8Linear(stored, bias, name="a", device=DEVICE).work(64, 128)
        assert work.num_bytes == 64 * 128 + 4 * num_scales + 2 * 64
        assert (work.row_flop, work.fp8_row_flop) == (0.0, 2 * 64 * 128)


def test_int4_has_half_a_byte_for_each_number_and_a_word_for_each_group(tmp_path: Path) -> None:
    format = Int4Format(packing="gptq", group_size=32, zero_offset=1)
    save_file(Int4Tensors.random(64, 128, format).stored("a"), tmp_path / "model.safetensors")
    kernel = GpuInt4Linear(Int4Weight(format, 64, 128, device=DEVICE), None, DEVICE)
    everything = (slice(None), slice(None))
    source = MatrixPart(name="a", shape=(64, 128), part=everything)
    shards = list(kernel.weight_shards(source, slice(None)))
    with Checkpoint(tmp_path) as checkpoint:
        fill_shards(shards, checkpoint, num_threads=1)
    kernel.finalize()
    work = kernel.work(64, 128)
    assert work.num_bytes == 64 * 128 // 2 + 4 * 64 * 4
    assert (work.row_flop, work.fp8_row_flop) == (2 * 64 * 128, 0.0)


def test_mxfp4_has_half_a_byte_for_each_number_and_one_for_each_block() -> None:
    config = ExpertsConfig(num_experts=3, num_chosen=2, intermediate_size=32, is_renormalized=True)
    product = Mxfp4Experts(
        ExpertPart(
            config=config,
            experts=range(3),
            hidden_size=64,
            intermediate_size=32,
            has_output_bias=False,
            dtype=torch.bfloat16,
            device=DEVICE,
        )
    )
    product.finalize()
    num_numbers = 3 * (2 * 32 * 64 + 64 * 32)
    # An odd number of blocks in a row of the down projection is padded to an even one.
    padding = 3 * 64 * 32 // 2
    assert product.num_bytes == num_numbers // 2 + num_numbers // 32 + padding
