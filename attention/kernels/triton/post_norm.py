"""Norms of outputs, added to the residual stream by the kernel that norms the stream.

Layers of Gemma norm what they add to the stream. Gemma 4 also scales the sum, adds the output of
experts to that of an MLP, and norms the stream up to three times, for each of its readers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from attention.kernels.triton.kernel_launcher import (
    KernelLauncher,
    can_depend,
    launch_options,
    wait_for_inputs,
)
from attention.kernels.triton.tuning import next_power_of_two

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["add_normed"]

_MOST_NORMS = 3


@triton.jit
def _row(pointer: tl.tensor, elements: tl.tensor, size: tl.constexpr) -> tl.tensor:
    """Return the elements of a row, float32, and zeros behind its end."""
    return tl.load(pointer + elements, mask=elements < size, other=0.0).to(tl.float32)


@triton.jit
def _scaled(x: tl.tensor, eps: tl.tensor, size: tl.constexpr) -> tl.tensor:
    """Return a row divided by its root mean square."""
    return x / tl.sqrt(tl.sum(x * x, axis=0) / size + eps)


@triton.jit
def _add_normed(
    stream: tl.tensor,
    output: tl.tensor,
    norm: tl.tensor,
    other: tl.tensor,
    output_norm: tl.tensor,
    other_norm: tl.tensor,
    scale: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    out: tl.tensor,
    stream_stride: tl.tensor,
    output_stride: tl.tensor,
    other_stride: tl.tensor,
    eps: tl.tensor,
    size: tl.constexpr,
    has_other: tl.constexpr,
    has_scale: tl.constexpr,
    num_norms: tl.constexpr,
    is_dependent: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Add the norm of an output to one row of the residual stream in place, and norm the sum.

    Launched by `add_normed`; grid `(num_rows,)`. Pointers: stream, output, other
    `[num_rows, size]`; the weights of norms, which are norm, output_norm, other_norm, first, second
    and third, `[size]`; scale `[1]`; out `[num_norms, num_rows, size]`.
    """
    row = tl.program_id(0).to(tl.int64)
    elements = tl.arange(0, tile)
    is_element = elements < size
    element_type = stream.dtype.element_ty
    # No kernel writes weights, so they can be loaded before the inputs are ready.
    weight = _row(norm, elements, size)
    if has_other:
        output_weight = _row(output_norm, elements, size)
        other_weight = _row(other_norm, elements, size)
    if has_scale:
        factor = tl.load(scale).to(tl.float32)
    if num_norms > 0:
        first_weight = _row(first, elements, size)
    wait_for_inputs(is_dependent)

    added = _row(output + row * output_stride, elements, size)
    kept = _row(stream + row * stream_stride, elements, size)
    # Every result is rounded as if it had been stored.
    if has_other:
        beside = _row(other + row * other_stride, elements, size)
        added = (_scaled(added, eps, size) * output_weight).to(element_type).to(tl.float32)
        beside = (_scaled(beside, eps, size) * other_weight).to(element_type).to(tl.float32)
        added = (added + beside).to(element_type).to(tl.float32)
    added = (_scaled(added, eps, size) * weight).to(element_type).to(tl.float32)
    kept = (kept + added).to(element_type).to(tl.float32)
    if has_scale:
        kept = (kept * factor).to(element_type).to(tl.float32)
    tl.store(stream + row * stream_stride + elements, kept.to(element_type), mask=is_element)

    if num_norms > 0:
        normed = _scaled(kept, eps, size)
        step = tl.num_programs(0).to(tl.int64) * size
        places = out + row * size + elements
        tl.store(places, (normed * first_weight).to(element_type), mask=is_element)
        if num_norms > 1:
            weighted = normed * _row(second, elements, size)
            tl.store(places + step, weighted.to(element_type), mask=is_element)
        if num_norms > 2:
            weighted = normed * _row(third, elements, size)
            tl.store(places + 2 * step, weighted.to(element_type), mask=is_element)


_ADD_NORMED = KernelLauncher(_add_normed)


def add_normed(
    stream: torch.Tensor,
    output: torch.Tensor,
    weights: Sequence[torch.Tensor],
    *,
    norm: torch.Tensor,
    eps: float,
    beside: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    scale: torch.Tensor | None = None,
    overlaps: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Return the norms of `stream + norm(output)`, `[num_rows, size]`, one for each weight.

    All norms are RMSNorm, given by their weights, `[size]`; there are at most three in `weights`.
    `stream` becomes the sum, times `scale`, `[1]`, if given. With `beside`, another output, the
    weight of a norm of `output` and that of the other, `norm` is that of the sum of both norms.
    With `overlaps`, the kernel starts as in `add_norm`.
    """
    num_rows, size = stream.shape
    assert stream.stride(1) == output.stride(1) == 1
    assert output.shape == stream.shape
    assert len(weights) <= _MOST_NORMS
    out = torch.empty((len(weights), num_rows, size), dtype=stream.dtype, device=stream.device)
    other, output_norm, other_norm = (output, norm, norm) if beside is None else beside
    assert other.shape == stream.shape
    assert other.stride(1) == 1
    if num_rows:
        # Any weight stands for weights that are not used.
        padded = [*weights, *[norm] * (_MOST_NORMS - len(weights))]
        tile = next_power_of_two(size)
        _ADD_NORMED.launch(
            (num_rows, 1, 1),
            (
                *(stream, output, norm, other, output_norm, other_norm),
                norm if scale is None else scale,
                *padded,
                out,
            ),
            (
                stream.stride(0),
                output.stride(0),
                other.stride(0),
                eps,
                size,
                beside is not None,
                scale is not None,
                len(weights),
                can_depend(stream.device),
                tile,
            ),
            num_warps=min(16, max(4, tile // 512)),
            **(launch_options(stream.device) if overlaps else {}),
        )
    return out.unbind(0)
