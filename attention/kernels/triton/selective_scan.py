"""Selective scans of the segments of a step: "Mamba-2" (Dao and Gu 2024).

A scan is a delta rule that subtracts nothing, so its kernels are those of delta rules, but for the
first: the decays of a chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from attention.kernels.arguments import CHUNK_SIZE
from attention.kernels.triton.delta_chunks import empty_decays, load_steps, pass_chunks
from attention.kernels.triton.delta_rule import launch_step
from attention.kernels.triton.kernel_launcher import (
    KernelLauncher,
    can_depend,
    launch_options,
    wait_for_inputs,
)
from attention.kernels.triton.segments import chunk_of_program, max_chunks

if TYPE_CHECKING:
    from attention.kernels.arguments import ScanGates, Segments

__all__ = ["selective_scan"]

_CHUNK = tl.constexpr(CHUNK_SIZE)


@triton.jit(do_not_specialize=["num_segments", "num_tokens"])
def _scan_decays(
    dt: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    query_starts: tl.tensor,
    rows: tl.tensor,
    decays: tl.tensor,
    step_sizes: tl.tensor,
    num_segments: tl.tensor,
    num_tokens: tl.tensor,
    dt_stride: tl.tensor,
    is_dependent: tl.constexpr,
) -> None:
    """Write the decays and step sizes of one chunk and head.

    Launched by `selective_scan`; grid `(chunks, num_heads)`. Pointers: dt `[num_tokens,
    num_heads]`, a_log, dt_bias `[num_heads]` float32; decays, step_sizes `[num_heads, num_tokens]`
    float32: the logarithms of the decay since the start of the chunk, and the factors of inputs.
    """
    wait_for_inputs(is_dependent)
    index, head = tl.program_id(0), tl.program_id(1)
    row, start, _, end = chunk_of_program(query_starts, rows, num_segments, num_tokens, index, True)
    if (row < 0) | (start >= end):
        return
    tokens = start + tl.arange(0, _CHUNK)
    is_token = tokens < end
    dt += tokens.to(tl.int64) * dt_stride + head
    log_decay, size = load_steps(dt, a_log + head, dt_bias + head, is_token)
    places = head.to(tl.int64) * num_tokens + tokens
    tl.store(decays + places, tl.cumsum(log_decay, axis=0), mask=is_token)
    tl.store(step_sizes + places, size, mask=is_token)


_SCAN_DECAYS = KernelLauncher(_scan_decays)


def selective_scan(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gates: ScanGates,
    states: torch.Tensor,
    segments: Segments,
) -> torch.Tensor:
    """Return the scan of each segment, as `recurrent.selective_scan` does."""
    num_tokens, num_heads, head_size = x.shape
    for part, size in ((x, head_size), (b, b.shape[2]), (c, b.shape[2])):
        assert part.stride()[1:] == (size, 1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if segments.max_query_len > 1 and not segments.is_chained:
        decays, step_sizes = empty_decays(x)
        starts, rows = segments.query_starts, segments.rows
        _SCAN_DECAYS.launch(
            (max_chunks(num_tokens, segments.max_prompts), num_heads, 1),
            (gates.dt, gates.a_log, gates.dt_bias, starts, rows, decays, step_sizes),
            (gates.dt.stride(0), can_depend(x.device)),
            (segments.max_prompts, num_tokens),
            num_warps=1,
            **launch_options(x.device),
        )
        pass_chunks(
            c, b, x, decays, step_sizes, states, segments, out, from_state=None, skip=gates.d
        )
    parameters = gates.dt, gates.dt, gates.a_log, gates.dt_bias, gates.d
    launch_step(c, b, x, parameters, states, segments, out, has_gates=False, is_delta=False)
    return out
