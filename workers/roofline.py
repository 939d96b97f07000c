"""What the steps of a rank must read and compute, and the measured speed of its device."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from pagedray.errors import DeviceError
from pagedray.rank_roofline import AttentionWork, DeviceSpeed, ExpertChoice, RankRoofline
from workers.layers.formats.fp8_rows import FP8
from workers.layers.linear_kernels.choice import make_linear_kernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from attention.abstract import AttentionSpec
    from workers.models.decoder import Decoder

__all__ = ["attention_work", "measure_roofline", "product_speed"]

_READ_BYTES = {"cpu": 2**28, "cuda": 2**29}
"""Number of bytes to read, which is more than caches hold."""
_MATRIX_SIZE = {"cpu": 1024, "cuda": 8192}
_WARM_UP_S = 0.05
_TRIAL_S = 0.02
_NUM_TRIALS = 10


def measure_roofline(model: Decoder, spec: AttentionSpec) -> RankRoofline:
    """Measure the device of a model, which takes about a second.

    Raises DeviceError if there is too little memory.
    """
    body, sampled = model.body_work(), model.sampled_work()
    experts = model.config.experts
    has_fp8 = body.fp8_row_flop + sampled.fp8_row_flop > 0.0
    try:
        speed = DeviceSpeed(
            read_bytes_per_s=_read_speed(model.device),
            flop_per_s=product_speed(model.dtype, model.device),
            fp8_flop_per_s=product_speed(FP8, model.device) if has_fp8 else None,
        )
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            "Too little GPU memory is free to measure the device; use a lower --memory-fraction "
            "or --num-blocks."
        ) from error
    return RankRoofline(
        weights=body,
        sampled=sampled,
        attention=attention_work(spec),
        experts=None if experts is None else ExpertChoice(experts.num_experts, experts.num_chosen),
        speed=speed,
    )


def attention_work(spec: AttentionSpec) -> tuple[AttentionWork, ...]:
    """Return what attention costs in the layers of each window."""
    token_bytes: dict[int | None, int] = defaultdict(int)
    pair_flop: dict[int | None, float] = defaultdict(float)
    for layer in spec.layers:
        window = layer.sliding_window
        # Keys and values; and the scores of a query and the sum of the values.
        token_bytes[window] += 2 * layer.num_kv_heads * layer.head_size * spec.cache_dtype.itemsize
        pair_flop[window] += 2 * 2.0 * layer.num_heads * layer.head_size
    return tuple(
        AttentionWork(window=window, token_bytes=num_bytes, pair_flop=pair_flop[window])
        for window, num_bytes in token_bytes.items()
    )


def product_speed(dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOP a second of a large product of matrices, which may be in fp8."""
    size = _MATRIX_SIZE[device.type]
    # A GPU takes less power, and is faster, with constant numbers.
    rows = torch.randn(size, size, device=device).to(dtype)
    multiply = _fp8_product(rows) if dtype == FP8 else _dense_product(rows)
    return 2.0 * size**3 / _seconds(multiply, device)


def _dense_product(rows: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return what multiplies rows by a weight, as many and as long, in the best layout."""
    kernel = make_linear_kernel(*rows.shape, has_bias=False, dtype=rows.dtype, device=rows.device)
    kernel.weight.normal_()
    kernel.finalize()
    return lambda: kernel(rows)


def _fp8_product(rows: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return what multiplies rows in fp8 by a weight, which are the same numbers."""
    scale = torch.ones(1, device=rows.device)
    return lambda: torch._scaled_mm(
        rows,
        rows.t(),
        scale_a=scale,
        scale_b=scale,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _read_speed(device: torch.device) -> float:
    """Return the bytes of memory that the device reads in a second."""
    num_bytes = _READ_BYTES[device.type]
    source = torch.ones(num_bytes // 4, device=device)
    if device.type == "cpu":
        # Reading two arrays uses more of the bandwidth than reading one.
        first, second = source.chunk(2)
        return num_bytes / _seconds(lambda: torch.dot(first, second), device)
    # A copy, which reads and writes, uses more of the bandwidth of a GPU than a sum does.
    target = torch.empty_like(source)
    return 2 * num_bytes / _seconds(lambda: target.copy_(source), device)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return how long a call takes at its fastest, if it follows others of its kind."""

    def run(num_calls: int) -> float:
        started_s = time.perf_counter()
        for _ in range(num_calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started_s

    run(1)
    num_warm_ups = max(1, math.ceil(_WARM_UP_S / run(1)))
    each_s = run(num_warm_ups) / num_warm_ups
    num_calls = max(1, math.ceil(_TRIAL_S / each_s))
    return min(run(num_calls) for _ in range(_NUM_TRIALS)) / num_calls
