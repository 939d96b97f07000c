"""The bytes of weights that products on a GPU read, against the definitions of their formats."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from pagedray.model_config import ExpertsConfig
from pagedray.weight_format import Fp8Format, Int4Format
from tests.small_models.int4_tensors import Int4Tensors
from workers.layers.expert_product import ExpertPart, Mxfp4Experts
from workers.layers.formats.fp8_linear import Fp8Linear
from workers.layers.formats.fp8_weight import Fp8Weight
from workers.layers.formats.int4_linear import GpuInt4Linear
from workers.layers.formats.int4_weight import Int4Weight
from workers.layers.weight import MatrixPart
from workers.weights.checkpoint import Checkpoint
from workers.weights.load_weights import fill_shards

# Without a GPU, Triton's interpreter is there.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


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
