"""What attention costs, against the layout of the cache, and the speed of this device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagedray.errors import DeviceError
from tests.workers.reference import BLOCK_SIZE, CPU, loaded_model, save_checkpoint
from workers.decoder_worker import attention_work, measure_roofline, product_speed
from workers.models.self_attention import attention_spec
from workers.parallel.group import SoloGroup
from workers.runner.kv_cache import block_bytes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_attention_reads_what_the_cache_has_of_a_token(tmp_path: Path) -> None:
    save_checkpoint("gemma2-capped", tmp_path)
    model = loaded_model(tmp_path, SoloGroup())
    spec = attention_spec(model.config, SoloGroup(), block_size=BLOCK_SIZE, device=CPU)
    found = {work.window: work for work in attention_work(spec)}
    assert set(found) == {layer.sliding_window for layer in spec.layers}
    assert len(found) == 2
    assert sum(one.token_bytes for one in found.values()) * BLOCK_SIZE == block_bytes(spec)
    heads = model.config.num_heads * model.config.head_size
    # Multiplication and addition, of a query with a key and of a weight with a value.
    assert sum(one.pair_flop for one in found.values()) == 2 * 2 * heads * len(spec.layers)


def test_this_device_is_measured(tmp_path: Path) -> None:
    save_checkpoint("mixtral-window", tmp_path)
    model = loaded_model(tmp_path, SoloGroup())
    spec = attention_spec(model.config, SoloGroup(), block_size=BLOCK_SIZE, device=CPU)
    roofline = measure_roofline(model, spec)
    # From a hundredth of a slow machine to far above a fast one.
    assert 1e8 < roofline.speed.read_bytes_per_s < 1e14
    assert 1e8 < roofline.speed.flop_per_s < 1e17
    assert roofline.speed.fp8_flop_per_s is None
    assert roofline.experts is not None
    assert roofline.experts.expected_part(1.0) == pytest.approx(2 / 5)


def test_products_of_fp8_are_measured() -> None:
    # Without a GPU, torch computes them on the CPU.
    assert 1e6 < product_speed(torch.float8_e4m3fn, DEVICE) < 1e17


def test_too_little_memory_is_an_error_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*sizes: int, device: torch.device) -> torch.Tensor:
        raise torch.OutOfMemoryError

    save_checkpoint("llama-5-heads", tmp_path)
    model = loaded_model(tmp_path, SoloGroup())
    spec = attention_spec(model.config, SoloGroup(), block_size=BLOCK_SIZE, device=CPU)
    monkeypatch.setattr(torch, "ones", allocate)
    with pytest.raises(DeviceError, match="Too little GPU memory is free"):
        measure_roofline(model, spec)
