"""Gated delta rules of the segments of a step, with their gates and norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from attention.kernels.arguments import CHUNK_SIZE, DeltaGates
from attention.kernels.triton.delta_chunks import (
    NORM_EPS,
    delta_chunks,
    gate_tensors,
    load_gates,
    load_steps,
)
from attention.kernels.triton.kernel_launcher import (
    KernelLauncher,
    can_depend,
    launch_options,
    wait_for_inputs,
)
from attention.kernels.triton.tuning import next_power_of_two

if TYPE_CHECKING:
    from attention.kernels.arguments import GatedNorm, Segments

__all__ = ["delta_rule", "gated_norm", "launch_step"]

_CHUNK = tl.constexpr(CHUNK_SIZE)
_STEP_VALUES = 16
"""Rows of a state in a program of one warp."""
_FEW_ROWS = 4
"""For so many rows at most, a program has a whole head, to norm it, and reads its state early."""
_NORM_ELEMENTS = 1024
"""Elements that a program norms, unless a head has more."""


@triton.jit
def _pass_token(
    state: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    is_token: tl.tensor,
    is_key: tl.tensor,
    is_value: tl.tensor,
    scale: tl.tensor,
    has_gates: tl.constexpr,
    is_delta: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the state after a token, the result of the token, and its values.

    Pointers to one head: query and key to its keys, value to its values, the others to its number.
    """
    q = tl.load(query, mask=is_key, other=0.0).to(tl.float32)
    k = tl.load(key, mask=is_key, other=0.0).to(tl.float32)
    v = tl.load(value, mask=is_value, other=0.0).to(tl.float32)
    if is_delta:
        log_decay, beta = load_gates(a, b, a_log, dt_bias, is_token, has_gates)
        q *= scale * tl.rsqrt(tl.sum(q * q, axis=0) + NORM_EPS)
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + NORM_EPS)
        state *= tl.exp(log_decay)
        change = beta * (v - tl.sum(state * k[None, :], axis=1))
    else:
        log_decay, size = load_steps(a, a_log, dt_bias, is_token)
        state *= tl.exp(log_decay)
        change = size * v
    # The sums do not wait for the change: S q + (k q) change is (S + change k^T) q.
    result = tl.sum(state * q[None, :], axis=1) + tl.sum(k * q, axis=0) * change
    state += change[:, None] * k[None, :]
    return state, result, v


@triton.jit
def _step(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    skip: tl.tensor,
    query_starts: tl.tensor,
    rows: tl.tensor,
    states: tl.tensor,
    out: tl.tensor,
    z: tl.tensor,
    norm_weight: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    a_stride: tl.tensor,
    b_stride: tl.tensor,
    row_stride: tl.tensor,
    z_stride: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    num_key_heads: tl.constexpr,
    num_heads: tl.constexpr,
    key_size: tl.constexpr,
    value_size: tl.constexpr,
    has_gates: tl.constexpr,
    is_delta: tl.constexpr,
    has_norm: tl.constexpr,
    is_decode: tl.constexpr,
    is_chained: tl.constexpr,
    keeps_states: tl.constexpr,
    reads_early: tl.constexpr,
    is_dependent: tl.constexpr,
    tile_key: tl.constexpr,
    tile_value: tl.constexpr,
) -> None:
    """Write some values of the result of one token and head, and update their rows of its state.

    Launched by `launch_step`; grid `(tiles of values, num_heads, num_segments)`. The token is the
    only one of its segment, or the last one if it is alone in its chunk; with `is_chained`, all
    tokens of the segment pass one after another. With `has_norm`, a program has all values of a
    head, and norms the result. Pointers: as in `_solve_chunk` and
    `_pass_states`; skip `[num_heads]` float32, without `is_delta`; out and z `[num_tokens,
    num_heads, value_size]`; norm_weight `[value_size]`.
    """
    head, segment = tl.program_id(1), tl.program_id(2)
    values = tl.program_id(0) * tile_value + tl.arange(0, tile_value)
    is_value = values < value_size
    keys = tl.arange(0, tile_key)
    is_key = keys < key_size
    is_state = is_value[:, None] & is_key[None, :]
    places = values[:, None] * key_size + keys[None, :]
    if reads_early:
        # In this step nothing else writes the states, and the rows were uploaded before it.
        row = tl.load(rows + segment)
        states += row.to(tl.int64) * row_stride + head * (value_size * key_size)
        state = tl.load(states + places, mask=is_state & (row >= 0), other=0.0).to(tl.float32)
    wait_for_inputs(is_dependent)
    token = segment.to(tl.int64)
    num_tokens = 1
    if not reads_early:
        row = tl.load(rows + segment)
    if not is_decode:
        end = tl.load(query_starts + segment + 1)
        first = tl.load(query_starts + segment)
        if is_chained:
            token = first.to(tl.int64)
            num_tokens = end - first
            if first == end:
                return
        else:
            if (end - first) % _CHUNK != 1:
                return
            token = (end - 1).to(tl.int64)
    out += (token * num_heads + head) * value_size + values
    if row < 0:
        for _ in range(num_tokens):
            tl.store(out, tl.zeros([tile_value], out.dtype.element_ty), mask=is_value)
            out += num_heads * value_size
        return
    if not reads_early:
        states += row.to(tl.int64) * row_stride + head * (value_size * key_size)
        state = tl.load(states + places, mask=is_state, other=0.0).to(tl.float32)
    key_head = head // (num_heads // num_key_heads) * key_size + keys
    query += token * query_stride + key_head
    key += token * key_stride + key_head
    value += token * value_stride + head * value_size + values
    a += token * a_stride + head
    b += token * b_stride + head
    z += token * z_stride + head * value_size + values
    # The first token by itself: the loop over the others would delay its loads.
    for is_later in tl.static_range(1 + is_chained):
        for _ in range(num_tokens - 1 if is_later else 1):
            if is_later:
                # As if the state had been stored.
                state = state.to(states.dtype.element_ty).to(tl.float32)
            state, result, v = _pass_token(
                state, query, key, value, a, b, a_log + head, dt_bias + head, row >= 0, is_key,
                is_value, scale, has_gates, is_delta,
            )  # fmt: skip
            if not is_delta:
                result += v * tl.load(skip + head)
            if has_norm:
                # Round as if the result had been stored.
                result = result.to(out.dtype.element_ty).to(tl.float32)
                result *= tl.rsqrt(tl.sum(result * result, axis=0) / value_size + eps)
                result *= tl.load(norm_weight + values, mask=is_value, other=0.0).to(tl.float32)
                gates = tl.load(z, mask=is_value, other=0.0).to(tl.float32)
                result *= gates / (1.0 + tl.exp(-gates))
            tl.store(out, result.to(out.dtype.element_ty), mask=is_value)
            query += query_stride
            key += key_stride
            value += value_stride
            a += a_stride
            b += b_stride
            out += num_heads * value_size
    if not keeps_states:
        tl.store(states + places, state.to(states.dtype.element_ty), mask=is_state)


@triton.jit
def _gated_norm(
    x: tl.tensor,
    z: tl.tensor,
    weight: tl.tensor,
    z_stride: tl.tensor,
    eps: tl.tensor,
    num_heads: tl.constexpr,
    size: tl.constexpr,
    weight_stride: tl.constexpr,
    gates_first: tl.constexpr,
    is_dependent: tl.constexpr,
    tile_heads: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Norm some heads of one token in place, with their gates.

    Launched by `gated_norm`; grid `(num_tokens, tiles of heads)`. Pointers: x, z `[num_tokens,
    num_heads, size]`, weight `[size]` of each head, or of all if the stride is 0.
    """
    wait_for_inputs(is_dependent)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * tile_heads + tl.arange(0, tile_heads)
    columns = tl.arange(0, tile)
    mask = (heads < num_heads)[:, None] & (columns < size)[None, :]
    places = heads[:, None] * size + columns[None, :]
    x += token * (num_heads * size) + places
    gates = tl.load(z + token * z_stride + places, mask=mask, other=0.0).to(tl.float32)
    gates = gates / (1.0 + tl.exp(-gates))
    weights = weight + heads[:, None] * weight_stride + columns[None, :]
    weights = tl.load(weights, mask=mask, other=0.0).to(tl.float32)
    values = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    if gates_first:
        values *= gates
    normed = values * tl.rsqrt(tl.sum(values * values, axis=1) / size + eps)[:, None] * weights
    if not gates_first:
        normed *= gates
    tl.store(x, normed.to(x.dtype.element_ty), mask=mask)


_STEP = KernelLauncher(_step)
_GATED_NORM = KernelLauncher(_gated_norm)


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gates: DeltaGates | tuple[torch.Tensor, torch.Tensor],
    norm: GatedNorm | None,
    states: torch.Tensor,
    segments: Segments,
) -> torch.Tensor:
    """Return the delta rule of each segment, `[num_tokens, num_heads, value_size]`.

    Without a norm, the gates are the logarithms of the decay and the betas; with a norm, arguments
    and results are those of `recurrent.gated_delta_rule`.
    """
    value_size, key_size = value.shape[2], key.shape[2]
    for part, size in ((query, key_size), (key, key_size), (value, value_size)):
        assert part.stride()[1:] == (size, 1)
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    if segments.max_query_len > 1 and not segments.is_chained:
        delta_chunks(query, key, value, gates, states, segments, out)
    a, b, a_log, dt_bias = gate_tensors(gates)
    parameters = a, b, a_log, dt_bias, a_log
    has_gates = not isinstance(gates, DeltaGates)
    # Few programs of whole heads read the states of more rows more slowly.
    is_normed = segments.max_query_len == 1 and len(segments.rows) <= _FEW_ROWS
    launch_step(
        query,
        key,
        value,
        parameters,
        states,
        segments,
        out,
        has_gates=has_gates,
        is_delta=True,
        norm=norm if is_normed else None,
    )
    if norm is not None and not is_normed:
        gated_norm(out, norm, gates_first=False)
    return out


def gated_norm(x: torch.Tensor, norm: GatedNorm, *, gates_first: bool) -> None:
    """Norm each head in place, with its gate; `x` is contiguous `[num_tokens, num_heads, size]`."""
    num_tokens, num_heads, size = x.shape
    weight, z = norm.weight, norm.z
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert z.stride()[1:] == (size, 1)
    tile = next_power_of_two(size)
    tile_heads = max(1, _NORM_ELEMENTS // tile)
    _GATED_NORM.launch(
        (num_tokens, triton.cdiv(num_heads, tile_heads), 1),
        (x, z, weight),
        (
            *(z.stride(0), norm.eps, num_heads, size, size if weight.ndim == 2 else 0),
            *(gates_first, can_depend(x.device), tile_heads, tile),
        ),
        num_warps=4,
        **launch_options(x.device),
    )


def launch_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    parameters: tuple[torch.Tensor, ...],
    states: torch.Tensor,
    segments: Segments,
    out: torch.Tensor,
    *,
    has_gates: bool,
    is_delta: bool,
    norm: GatedNorm | None = None,
) -> None:
    """Write the results of tokens that are alone in their chunks, or of chains.

    Their states are updated, unless they are kept.

    `parameters` are the tensors of the kernel from `a` to `skip`. With a norm of each head, every
    segment has one token.
    """
    num_heads, value_size = value.shape[1:]
    num_key_heads, key_size = key.shape[1:]
    assert states.stride()[1:] == (value_size * key_size, key_size, 1)
    a, b = parameters[:2]
    is_decode = segments.max_query_len == 1
    tile_key = next_power_of_two(key_size)
    tile = next_power_of_two(value_size)
    if norm is None:
        tile, z, weight, eps = min(_STEP_VALUES, tile), out, out, 0.0
    else:
        z, weight, eps = norm.z, norm.weight, norm.eps
        assert z.stride()[1:] == (value_size, 1)
        assert weight.shape == (value_size,)
    _STEP.launch(
        (triton.cdiv(value_size, tile), num_heads, len(segments.rows)),
        (
            *(query, key, value, *parameters),
            *(segments.query_starts, segments.rows, states, out, z, weight),
        ),
        (
            *(query.stride(0), key.stride(0), value.stride(0), a.stride(0), b.stride(0)),
            *(states.stride(0), z.stride(0), key_size**-0.5, eps),
            *(num_key_heads, num_heads, key_size, value_size, has_gates, is_delta),
            *(norm is not None, is_decode, segments.is_chained, segments.keeps_states),
            is_decode and len(segments.rows) <= _FEW_ROWS,
            can_depend(value.device),
            tile_key,
            tile,
        ),
        num_warps=max(1, min(8, tile // _STEP_VALUES)),
        **launch_options(value.device),
    )
