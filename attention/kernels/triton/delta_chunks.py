"""Gated delta rules of prefills, by chunks: "Gated Delta Networks" (Yang et al. 2024).

Three kernels: the triangular system of each chunk, which does not depend on the state; the state
from chunk to chunk; and the results of each chunk, given the state at its start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from attention.kernels.arguments import CHUNK_SIZE, DeltaGates
from attention.kernels.triton.kernel_launcher import (
    KernelLauncher,
    can_depend,
    launch_options,
    wait_for_inputs,
)
from attention.kernels.triton.segments import chunk_of_program, count_chunks_before, max_chunks
from attention.kernels.triton.tuning import dot_type, next_power_of_two

if TYPE_CHECKING:
    from attention.kernels.arguments import Segments

__all__ = [
    "NORM_EPS",
    "delta_chunks",
    "empty_decays",
    "gate_tensors",
    "load_gates",
    "load_steps",
    "pass_chunks",
]

NORM_EPS = tl.constexpr(1e-6)
"""Added to the sum of squares of queries and keys."""
_CHUNK = tl.constexpr(CHUNK_SIZE)
_STATE_VALUES = 32
"""Rows of a state in a program."""
_OUT_VALUES = 128
_SOLVE_OPTIONS = {"num_warps": 4, "num_stages": 3}
_PASS_OPTIONS = {"num_warps": 4, "num_stages": 3}
_RESULT_OPTIONS = {"num_warps": 4, "num_stages": 3}
_EXACT_OPTIONS = {"num_warps": 8, "num_stages": 1}
"""Options of all three kernels in float32, where operands take more memory."""
_EXACT_VALUES = 32
_PRECISION = "tf32x3"
"""Of products in float32: three terms are as precise, and tensor cores compute them."""


@triton.jit
def load_steps(
    a: tl.tensor, a_log: tl.tensor, dt_bias: tl.tensor, is_token: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return the logarithms of the decay and the step sizes of a head; zeros without a token.

    `a` are pointers to the entries of tokens, and `a_log` and `dt_bias` to the entry of the head.
    """
    x = tl.load(a, mask=is_token, other=0.0).to(tl.float32) + tl.load(dt_bias)
    # The logarithm of 1 + u would lose a small u.
    u = tl.exp(tl.minimum(x, 20.0))
    softplus = tl.where(u < 1e-3, u * (1.0 - 0.5 * u), tl.log(1.0 + u))
    softplus = tl.where(is_token, tl.where(x > 20.0, x, softplus), 0.0)
    return -tl.exp(tl.load(a_log)) * softplus, softplus


@triton.jit
def load_gates(
    a: tl.tensor,
    b: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    is_token: tl.tensor,
    has_gates: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the logarithms of the decay and the betas of a head; zeros without a token.

    Pointers are as in `load_steps`. With `has_gates`, `a` and `b` are the gates; otherwise
    `DeltaGates` says what they are.
    """
    y = tl.load(b, mask=is_token, other=0.0).to(tl.float32)
    if has_gates:
        return tl.load(a, mask=is_token, other=0.0).to(tl.float32), y
    log_decay, _ = load_steps(a, a_log, dt_bias, is_token)
    return log_decay, tl.where(is_token, 1.0 / (1.0 + tl.exp(-y)), 0.0)


@triton.jit
def _load_tile(
    rows: tl.tensor,
    tokens: tl.tensor,
    end: tl.tensor,
    stride: tl.tensor,
    columns: tl.tensor,
    num_columns: tl.constexpr,
    dot_type: tl.constexpr,
) -> tl.tensor:
    """Return columns of the rows of some tokens; zeros from `end` on."""
    places = tokens.to(tl.int64)[:, None] * stride + columns[None, :]
    mask = (tokens < end)[:, None] & (columns < num_columns)[None, :]
    return tl.load(rows + places, mask=mask, other=0.0).to(dot_type)


@triton.jit
def _inverse(system: tl.tensor, operand_type: tl.constexpr, precision: tl.constexpr) -> tl.tensor:
    """Return the inverse of the identity plus a strictly lower triangular matrix.

    The blocks on the diagonal are inverted, from 2 x 2 on; each pair of them makes a block of twice
    the size: the inverse of [[A, 0], [C, B]] is [[1 / A, 0], [-1 / B C 1 / A, 1 / B]]. Elements of
    the matrix and of its inverse are at most 1, if keys are unit vectors.
    """
    rows = tl.arange(0, _CHUNK)[:, None]
    columns = tl.arange(0, _CHUNK)[None, :]
    is_pair = (rows == columns + 1) & (rows % 2 == 1)
    inverse = tl.where(rows == columns, 1.0, tl.where(is_pair, -system, 0.0))
    for level in tl.static_range(1, 6):
        half = 1 << level
        is_pair = (rows // half == columns // half + 1) & (rows // half % 2 == 1)
        between = tl.where(is_pair, system, 0.0).to(operand_type)
        known = inverse.to(operand_type)
        between = tl.dot(known, between, input_precision=precision).to(operand_type)
        inverse -= tl.dot(between, known, input_precision=precision)
    return inverse


@triton.jit(do_not_specialize=["num_segments", "num_tokens"])
def _solve_chunk(
    key: tl.tensor,
    value: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    query_starts: tl.tensor,
    rows: tl.tensor,
    from_values: tl.tensor,
    from_state: tl.tensor,
    decays: tl.tensor,
    key_scales: tl.tensor,
    num_segments: tl.tensor,
    num_tokens: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    a_stride: tl.tensor,
    b_stride: tl.tensor,
    num_key_heads: tl.constexpr,
    num_heads: tl.constexpr,
    key_size: tl.constexpr,
    value_size: tl.constexpr,
    has_gates: tl.constexpr,
    dot_type: tl.constexpr,
    precision: tl.constexpr,
    system_type: tl.constexpr,
    is_dependent: tl.constexpr,
    tile_key: tl.constexpr,
    tile_value: tl.constexpr,
) -> None:
    """Solve the system of one chunk and head.

    Launched by `delta_chunks`; grid `(chunks, num_heads)`. Pointers: key `[num_tokens,
    num_key_heads, key_size]`, value `[num_tokens, num_heads, value_size]`; gates as in
    `load_gates`; from_values, from_state `[num_tokens, num_heads, size]` of values and keys;
    decays, key_scales `[num_heads, num_tokens]` float32: the logarithms of the decay since the
    start of the chunk, and the inverse lengths of keys.
    """
    wait_for_inputs(is_dependent)
    index, head = tl.program_id(0), tl.program_id(1)
    row, start, _, end = chunk_of_program(query_starts, rows, num_segments, num_tokens, index, True)
    if (row < 0) | (start >= end):
        return
    order = tl.arange(0, _CHUNK)
    tokens = start + order
    is_token = tokens < end
    key_columns = tl.arange(0, tile_key)
    key += head // (num_heads // num_key_heads) * key_size
    keys = _load_tile(key, tokens, end, key_stride, key_columns, key_size, dot_type)
    squares = keys.to(tl.float32) * keys.to(tl.float32)
    key_scale = tl.rsqrt(tl.sum(squares, axis=1) + NORM_EPS)
    log_decay, beta = load_gates(
        a + tokens.to(tl.int64) * a_stride + head, b + tokens.to(tl.int64) * b_stride + head,
        a_log + head, dt_bias + head, is_token, has_gates,
    )  # fmt: skip
    decay = tl.cumsum(log_decay, axis=0)
    places = head.to(tl.int64) * num_tokens + tokens
    tl.store(decays + places, decay, mask=is_token)
    tl.store(key_scales + places, key_scale, mask=is_token)
    is_earlier = order[:, None] > order[None, :]
    between = tl.exp(tl.where(is_earlier, decay[:, None] - decay[None, :], 0.0))
    products = tl.dot(keys, tl.trans(keys), input_precision=precision) * between
    products *= (beta * key_scale)[:, None] * key_scale[None, :]
    inverse = _inverse(tl.where(is_earlier, products, 0.0), system_type, precision)
    weights = (inverse * beta[None, :]).to(dot_type)
    value_columns = tl.arange(0, tile_value)
    values = _load_tile(
        value + head * value_size, tokens, end, value_stride, value_columns, value_size, dot_type
    )
    places = (tokens.to(tl.int64) * num_heads + head)[:, None]
    solved = tl.dot(weights, values, input_precision=precision)
    tl.store(
        from_values + places * value_size + value_columns[None, :],
        solved.to(from_values.dtype.element_ty),
        mask=is_token[:, None] & (value_columns < value_size)[None, :],
    )
    weights = (inverse * (beta * key_scale * tl.exp(decay))[None, :]).to(dot_type)
    solved = tl.dot(weights, keys, input_precision=precision)
    tl.store(
        from_state + places * key_size + key_columns[None, :],
        solved.to(from_state.dtype.element_ty),
        mask=is_token[:, None] & (key_columns < key_size)[None, :],
    )


@triton.jit(do_not_specialize=["num_tokens", "first_spare"])
def _pass_states(
    key: tl.tensor,
    from_state: tl.tensor,
    decays: tl.tensor,
    key_scales: tl.tensor,
    query_starts: tl.tensor,
    rows: tl.tensor,
    changes: tl.tensor,
    chunk_states: tl.tensor,
    states: tl.tensor,
    save_ends: tl.tensor,
    num_tokens: tl.tensor,
    first_spare: tl.tensor,
    key_stride: tl.tensor,
    change_stride: tl.tensor,
    row_stride: tl.tensor,
    num_spares: tl.constexpr,
    num_key_heads: tl.constexpr,
    num_heads: tl.constexpr,
    key_size: tl.constexpr,
    value_size: tl.constexpr,
    is_delta: tl.constexpr,
    dot_type: tl.constexpr,
    precision: tl.constexpr,
    is_dependent: tl.constexpr,
    tile_key: tl.constexpr,
    tile_value: tl.constexpr,
) -> None:
    """Pass some rows of the state of one segment and head from chunk to chunk.

    Launched by `pass_chunks`; grid `(tiles of values, num_heads, num_segments)`. Pointers: as in
    `_solve_chunk` and `Segments`; changes `[num_tokens, num_heads, value_size]`, if `is_delta` at
    first the solution from values; chunk_states `[chunks, num_heads, value_size, key_size]`, the
    state before each chunk; states `[num_rows, num_heads, value_size, key_size]`, spare
    states from row `first_spare` on.
    """
    wait_for_inputs(is_dependent)
    head, segment = tl.program_id(1), tl.program_id(2)
    row = tl.load(rows + segment)
    start = tl.load(query_starts + segment)
    end = tl.load(query_starts + segment + 1)
    end -= ((end - start) % _CHUNK == 1).to(tl.int32)
    if (row < 0) | (start >= end):
        return
    value_columns = tl.program_id(0) * tile_value + tl.arange(0, tile_value)
    key_columns = tl.arange(0, tile_key)
    is_state = (value_columns < value_size)[:, None] & (key_columns < key_size)[None, :]
    places = (head * value_size + value_columns)[:, None] * key_size + key_columns[None, :]
    states += places
    state = states + row.to(tl.int64) * row_stride
    state = tl.load(state, mask=is_state, other=0.0).to(tl.float32)
    chunk = count_chunks_before(query_starts, segment).to(tl.int64)
    chunk_states += chunk * (num_heads * value_size * key_size) + places
    key += head // (num_heads // num_key_heads) * key_size
    changes += head * value_size
    from_state += head * key_size
    decays += head.to(tl.int64) * num_tokens
    key_scales += head.to(tl.int64) * num_tokens
    if num_spares:
        spares = tl.arange(0, num_spares)
        saved = tl.load(save_ends + spares)
    for first in range(start, end, _CHUNK):
        tokens = first + tl.arange(0, _CHUNK)
        is_token = tokens < end
        tl.store(chunk_states, state.to(chunk_states.dtype.element_ty), mask=is_state)
        change_places = tokens.to(tl.int64)[:, None] * change_stride + value_columns[None, :]
        is_change = is_token[:, None] & (value_columns < value_size)[None, :]
        change = tl.load(changes + change_places, mask=is_change, other=0.0).to(tl.float32)
        if is_delta:
            factors = _load_tile(
                from_state, tokens, end, num_heads * key_size, key_columns, key_size, dot_type
            )
            kept = state.to(dot_type)
            change -= tl.dot(factors, tl.trans(kept), input_precision=precision)
            tl.store(changes + change_places, change.to(changes.dtype.element_ty), mask=is_change)
        decay = tl.load(decays + tokens, mask=is_token, other=0.0)
        last = tl.load(decays + tl.minimum(first + _CHUNK, end) - 1)
        scale = tl.load(key_scales + tokens, mask=is_token, other=0.0) * tl.exp(last - decay)
        keys = _load_tile(key, tokens, end, key_stride, key_columns, key_size, dot_type)
        scaled = tl.where(is_token[:, None], change * scale[:, None], 0.0).to(dot_type)
        state *= tl.exp(last)
        state += tl.dot(tl.trans(scaled), keys, input_precision=precision)
        # As where a segment ends, so that results do not depend on the ends.
        state = state.to(states.dtype.element_ty).to(tl.float32)
        chunk_states += num_heads * value_size * key_size
        if num_spares:
            spare = tl.max(tl.where(saved == first + _CHUNK, spares, -1), axis=0)
            target = states + (first_spare + spare).to(tl.int64) * row_stride
            tl.store(target, state.to(states.dtype.element_ty), mask=is_state & (spare >= 0))
    states += row.to(tl.int64) * row_stride
    tl.store(states, state.to(states.dtype.element_ty), mask=is_state)


@triton.jit(do_not_specialize=["num_segments", "num_tokens"])
def _chunk_results(
    query: tl.tensor,
    key: tl.tensor,
    decays: tl.tensor,
    key_scales: tl.tensor,
    query_starts: tl.tensor,
    rows: tl.tensor,
    chunk_states: tl.tensor,
    changes: tl.tensor,
    skip: tl.tensor,
    out: tl.tensor,
    num_segments: tl.tensor,
    num_tokens: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    change_stride: tl.tensor,
    scale: tl.tensor,
    num_key_heads: tl.constexpr,
    num_heads: tl.constexpr,
    key_size: tl.constexpr,
    value_size: tl.constexpr,
    is_delta: tl.constexpr,
    dot_type: tl.constexpr,
    precision: tl.constexpr,
    is_dependent: tl.constexpr,
    tile_key: tl.constexpr,
    tile_value: tl.constexpr,
) -> None:
    """Write the results of one chunk and head.

    Launched by `pass_chunks`; grid `(chunks, num_heads, tiles of values)`. Pointers: as in
    `_solve_chunk` and `_pass_states`; query `[num_tokens, num_key_heads, key_size]`; skip
    `[num_heads]` float32, without `is_delta`; out `[num_tokens, num_heads, value_size]`, which may
    be the changes.
    """
    wait_for_inputs(is_dependent)
    index, head = tl.program_id(0), tl.program_id(1)
    row, start, _, end = chunk_of_program(query_starts, rows, num_segments, num_tokens, index, True)
    if start >= end:
        return
    order = tl.arange(0, _CHUNK)
    tokens = start + order
    is_token = tokens < end
    value_columns = tl.program_id(2) * tile_value + tl.arange(0, tile_value)
    is_value = value_columns < value_size
    places = (tokens.to(tl.int64) * num_heads + head)[:, None] * value_size + value_columns[None, :]
    is_out = is_token[:, None] & is_value[None, :]
    if row < 0:
        tl.store(out + places, tl.zeros([_CHUNK, tile_value], out.dtype.element_ty), mask=is_out)
        return
    key_columns = tl.arange(0, tile_key)
    offset = head // (num_heads // num_key_heads) * key_size
    keys = _load_tile(key + offset, tokens, end, key_stride, key_columns, key_size, dot_type)
    queries = _load_tile(query + offset, tokens, end, query_stride, key_columns, key_size, dot_type)
    decays += head.to(tl.int64) * num_tokens
    decay = tl.load(decays + tokens, mask=is_token, other=0.0)
    key_scale = tl.load(
        key_scales + head.to(tl.int64) * num_tokens + tokens, mask=is_token, other=0.0
    )
    chunk_states += (index.to(tl.int64) * num_heads + head) * (value_size * key_size)
    is_state = is_value[:, None] & (key_columns < key_size)[None, :]
    state_places = value_columns[:, None] * key_size + key_columns[None, :]
    state = tl.load(chunk_states + state_places, mask=is_state, other=0.0).to(dot_type)
    sums = tl.dot(queries, tl.trans(state), input_precision=precision) * tl.exp(decay)[:, None]
    is_seen = order[:, None] >= order[None, :]
    between = tl.exp(tl.where(is_seen, decay[:, None] - decay[None, :], 0.0)) * key_scale[None, :]
    seen = tl.dot(queries, tl.trans(keys), input_precision=precision)
    seen = tl.where(is_seen, seen * between, 0.0).to(dot_type)
    change_places = tokens.to(tl.int64)[:, None] * change_stride + value_columns[None, :]
    change = tl.load(changes + head * value_size + change_places, mask=is_out, other=0.0)
    sums += tl.dot(seen, change.to(dot_type), input_precision=precision)
    if is_delta:
        squares = queries.to(tl.float32) * queries.to(tl.float32)
        sums *= (scale * tl.rsqrt(tl.sum(squares, axis=1) + NORM_EPS))[:, None]
    else:
        sums += change.to(tl.float32) * tl.load(skip + head)
    tl.store(out + places, sums.to(out.dtype.element_ty), mask=is_out)


_SOLVE_CHUNK = KernelLauncher(_solve_chunk)
_PASS_STATES = KernelLauncher(_pass_states)
_CHUNK_RESULTS = KernelLauncher(_chunk_results)


def gate_tensors(
    gates: DeltaGates | tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the pointers of `load_gates`; a pair is the logarithms of the decay and the betas."""
    if isinstance(gates, DeltaGates):
        assert gates.a_log.dtype == gates.dt_bias.dtype == torch.float32
        return gates.a, gates.b, gates.a_log, gates.dt_bias
    return *gates, gates[0], gates[0]


def delta_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gates: DeltaGates | tuple[torch.Tensor, torch.Tensor],
    states: torch.Tensor,
    segments: Segments,
    out: torch.Tensor,
) -> None:
    """Write the results of all chunks to `out`, and update the states.

    Tokens that are alone in the last chunk of a segment are left out; tokens behind the last
    segment have results of 0. Arguments are those of the delta rule.
    """
    num_tokens, num_heads, value_size = value.shape
    num_key_heads, key_size = key.shape[1:]
    device = value.device
    from_state = torch.empty((num_tokens, num_heads, key_size), dtype=value.dtype, device=device)
    decays, key_scales = empty_decays(value)
    a, b, a_log, dt_bias = gate_tensors(gates)
    operand_type, is_exact = dot_type(value), value.dtype == torch.float32
    _SOLVE_CHUNK.launch(
        (max_chunks(num_tokens, segments.max_prompts), num_heads, 1),
        (
            *(key, value, a, b, a_log, dt_bias, segments.query_starts, segments.rows),
            *(out, from_state, decays, key_scales),
        ),
        (
            *(key.stride(0), value.stride(0), a.stride(0), b.stride(0)),
            *(num_key_heads, num_heads, key_size, value_size),
            not isinstance(gates, DeltaGates),
            operand_type,
            _PRECISION,
            tl.float32 if operand_type == tl.float32 else tl.float16,
            can_depend(device),
            max(16, next_power_of_two(key_size)),
            max(16, next_power_of_two(value_size)),
        ),
        (segments.max_prompts, num_tokens),
        **(_EXACT_OPTIONS if is_exact else _SOLVE_OPTIONS),
        **launch_options(device),
    )
    pass_chunks(
        query, key, out, decays, key_scales, states, segments, out, from_state=from_state, skip=None
    )


def empty_decays(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for decays and scales of keys, `[num_heads, num_tokens]` float32 each."""
    num_tokens, num_heads = value.shape[:2]
    memory = torch.empty((2, num_heads, num_tokens), dtype=torch.float32, device=value.device)
    return memory[0], memory[1]


def pass_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    changes: torch.Tensor,
    decays: torch.Tensor,
    key_scales: torch.Tensor,
    states: torch.Tensor,
    segments: Segments,
    out: torch.Tensor,
    *,
    from_state: torch.Tensor | None,
    skip: torch.Tensor | None,
) -> None:
    """Pass the states from chunk to chunk, and write the results of all chunks to `out`.

    Arguments are those of the kernels. With `from_state`, it is a delta rule; otherwise, `skip` is
    the factor of the changes that is added to the results.
    """
    num_tokens, num_heads, value_size = changes.shape
    num_key_heads, key_size = key.shape[1:]
    device, num_segments = changes.device, segments.max_prompts
    num_chunks = max_chunks(num_tokens, num_segments)
    chunk_states = torch.empty(
        (num_chunks, num_heads, value_size, key_size), dtype=out.dtype, device=device
    )
    is_exact, is_delta = out.dtype == torch.float32, from_state is not None
    shape = (num_key_heads, num_heads, key_size, value_size)
    constants = (*shape, is_delta, dot_type(key), _PRECISION, can_depend(device))
    tile_key = max(16, next_power_of_two(key_size))
    tile_value = max(16, next_power_of_two(value_size))
    tile = min(_EXACT_VALUES if is_exact else _STATE_VALUES, tile_value)
    starts, rows, num_spares = segments.query_starts, segments.rows, segments.num_spares
    _PASS_STATES.launch(
        (triton.cdiv(value_size, tile), num_heads, num_segments),
        (
            *(key, key if from_state is None else from_state, decays, key_scales, starts, rows),
            *(changes, chunk_states, states),
            rows if segments.save_ends is None else segments.save_ends,
        ),
        (
            *(key.stride(0), changes.stride(0), states.stride(0), num_spares),
            *(*constants, tile_key, tile),
        ),
        (num_tokens, len(states) - num_spares),
        **(_EXACT_OPTIONS if is_exact else _PASS_OPTIONS),
        **launch_options(device),
    )
    tile = min(_EXACT_VALUES if is_exact else _OUT_VALUES, tile_value)
    _CHUNK_RESULTS.launch(
        (num_chunks, num_heads, triton.cdiv(value_size, tile)),
        (
            *(query, key, decays, key_scales, starts, rows, chunk_states),
            *(changes, decays if skip is None else skip, out),
        ),
        (
            *(query.stride(0), key.stride(0), changes.stride(0), key_size**-0.5),
            *constants,
            tile_key,
            tile,
        ),
        (num_segments, num_tokens),
        **(_EXACT_OPTIONS if is_exact else _RESULT_OPTIONS),
        **launch_options(device),
    )
