"""Layers with recurrent state: causal convolutions, gated delta rules and selective scans.

Owns the choice of the kernels and their plain versions in torch. States are updated in place,
unless `Segments` keeps them; the caller has zeroed the state of a new sequence. States are views
`[num_rows, ...]` of a buffer: rows may be far apart, and each is contiguous.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn import functional

from attention.kernels.arguments import CHUNK_SIZE, RuleTokens
from attention.kernels.cpu import recurrent_steps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attention.kernels.arguments import DeltaGates, GatedNorm, ScanGates, Segments

__all__ = ["causal_conv", "gated_delta_rule", "gated_norm", "selective_scan"]

_EPS = 1e-6
"""Added to the sum of squares of queries and keys."""


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    segments: Segments,
    activation: Literal["silu"] | None,
) -> torch.Tensor:
    """Return the causal depthwise convolution of each segment, `[num_tokens, num_channels]`.

    `x` is `[num_tokens, num_channels]`, `weight` `[num_channels, width]`, with the weight of the
    current token last, and `bias` `[num_channels]`. `states` are the last tokens before each
    segment, `[num_rows, width - 1, num_channels]`, of the dtype of `x`.
    """
    if x.is_cuda:
        from attention.kernels.triton import causal_conv as triton_kernel

        return triton_kernel.causal_conv(x, weight, bias, states, segments, activation)
    if segments.save_ends is not None:
        saving = [
            causal_conv(x[tokens], weight, bias, states, own, activation)
            for tokens, own in _parts(states, segments)
        ]
        return torch.cat(saving)
    has_silu = activation == "silu"
    results = recurrent_steps.causal_conv(x, weight, bias, states, segments, has_silu=has_silu)
    if results is not None:
        return results
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    taps = weight.float().t()
    for row, first, end in segments.spans():
        inputs = torch.cat((states[row], x[first:end])).float()
        sums = out[first:end]
        if bias is not None:
            sums += bias
        # A grouped convolution of torch in bfloat16 takes many times as long on a CPU.
        for offset, tap in enumerate(taps):
            sums.addcmul_(inputs[offset : offset + end - first], tap)
        if has_silu:
            functional.silu(sums, inplace=True)
        if not segments.keeps_states:
            states[row] = inputs[end - first :]
    return out.to(x.dtype)


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gates: DeltaGates,
    norm: GatedNorm,
    states: torch.Tensor,
    segments: Segments,
) -> torch.Tensor:
    """Return the gated norm of the delta rule of each segment, of the shape of `value`.

    With normalized keys k and queries q, a token decays the state S by the exponential of the
    logarithm of its decay, adds `beta * (v - S k) k^T` to it, and returns `S q / sqrt(key_size)`.
    `query` and `key` are `[num_tokens, num_key_heads, key_size]`, `value` is `[num_tokens,
    num_value_heads, value_size]`; adjacent value heads share a key head. `states` are `[num_rows,
    num_value_heads, value_size, key_size]`.
    """
    if value.is_cuda:
        from attention.kernels.triton import delta_rule as triton_kernels

        return triton_kernels.delta_rule(query, key, value, gates, norm, states, segments)
    log_decay = -gates.a_log.float().exp() * functional.softplus(gates.a.float() + gates.dt_bias)
    beta = gates.b.float().sigmoid()
    return _delta_rule(RuleTokens(query, key, value, log_decay, beta), norm, states, segments)


def selective_scan(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gates: ScanGates,
    states: torch.Tensor,
    segments: Segments,
) -> torch.Tensor:
    """Return the selective scan of each segment, `[num_tokens, num_heads, head_size]`.

    A token decays the state S, adds `step_size * x b^T` to it, and returns `S c + d x`. `x` is
    `[num_tokens, num_heads, head_size]`, `b` and `c` are `[num_tokens, num_groups, state_size]`;
    adjacent heads share a group. `states` are `[num_rows, num_heads, head_size, state_size]`.
    """
    if x.is_cuda:
        from attention.kernels.triton import selective_scan as triton_kernels

        return triton_kernels.selective_scan(x, b, c, gates, states, segments)
    sizes = functional.softplus(gates.dt.float() + gates.dt_bias)
    log_decay = -gates.a_log.exp() * sizes
    return _selective_scan(RuleTokens(c, b, x, log_decay, sizes), gates.d, states, segments)


def gated_norm(x: torch.Tensor, norm: GatedNorm, *, gates_first: bool) -> torch.Tensor:
    """Return the norm of each head with its gate, `[num_tokens, num_heads, head_size]`.

    With `gates_first`, the gates multiply the inputs of the norm in place of its results. `x` is
    contiguous, and may become the result.
    """
    if x.is_cuda:
        from attention.kernels.triton import delta_rule as triton_kernels

        triton_kernels.gated_norm(x, norm, gates_first=gates_first)
        return x
    gates = functional.silu(norm.z.float())
    values = x * gates if gates_first else x.float()
    normed = functional.rms_norm(values, x.shape[2:], None, norm.eps) * norm.weight
    return (normed if gates_first else normed * gates).to(x.dtype)


def _delta_rule(
    tokens: RuleTokens, norm: GatedNorm | None, states: torch.Tensor, segments: Segments
) -> torch.Tensor:
    """Return the results on a CPU, by a kernel or else by torch; None is no norm."""
    if segments.save_ends is not None:
        saving = [
            _delta_rule(tokens.part(part), norm and replace(norm, z=norm.z[part]), states, own)
            for part, own in _parts(states, segments)
        ]
        return torch.cat(saving)
    out = tokens.value.new_zeros(tokens.value.shape)
    if recurrent_steps.rule(tokens, None, norm, states, segments, out):
        return out
    for state, chunks, last in _cut(states, segments):
        if chunks is not None:
            results = _delta_chunks(_prepared(tokens.part(chunks)), state)
            out[chunks] = _normed(results, norm, chunks)
        if last is not None:
            results = _delta_step(_prepared(tokens.part(last)), state)
            out[last] = _normed(results, norm, last)
    return out


def _selective_scan(
    tokens: RuleTokens, d: torch.Tensor, states: torch.Tensor, segments: Segments
) -> torch.Tensor:
    """Return the results on a CPU, by a kernel or else by torch."""
    if segments.save_ends is not None:
        saving = [
            _selective_scan(tokens.part(part), d, states, own)
            for part, own in _parts(states, segments)
        ]
        return torch.cat(saving)
    x = tokens.value
    out = x.new_zeros(x.shape)
    if recurrent_steps.rule(tokens, d, None, states, segments, out):
        return out
    for state, chunks, last in _cut(states, segments):
        if chunks is not None:
            results = _scan_chunks(_spread(tokens.part(chunks)), state)
            out[chunks] = results.add_(x[chunks] * d[:, None])
        if last is not None:
            results = _scan_step(_spread(tokens.part(last)), state)
            out[last] = results.add_(x[last] * d[:, None])
    return out


def _parts(states: torch.Tensor, segments: Segments) -> Iterator[tuple[slice, Segments]]:
    """Yield the tokens up to each save with their segments; save the state after them."""
    for tokens, own, row, spare in segments.parts():
        yield tokens, own
        if row >= 0:
            states[spare - segments.num_spares] = states[row]


def _cut(
    states: torch.Tensor, segments: Segments
) -> Iterator[tuple[torch.Tensor, slice | None, slice | None]]:
    """Yield the state of each segment, its chunks, and its last token if it is alone in a chunk.

    Such a token is computed as a decode would compute it, and so is each token of a chain.
    """
    for row, first, end in segments.spans():
        state = states[row]
        if segments.is_chained:
            state = state.clone() if segments.keeps_states else state
            for token in range(first, end):
                yield state, None, slice(token, token + 1)
            continue
        is_alone = (end - first) % CHUNK_SIZE == 1
        middle = end - is_alone
        chunks = slice(first, middle) if first < middle else None
        yield state, chunks, slice(middle, end) if is_alone else None


def _prepared(tokens: RuleTokens) -> RuleTokens:
    """Return the inputs of a delta rule in float32, with queries and keys as unit vectors."""
    query = _unit(tokens.query).mul_(tokens.key.shape[2] ** -0.5)
    return _spread(tokens._replace(query=query, key=_unit(tokens.key)))


def _spread(tokens: RuleTokens) -> RuleTokens:
    """Return inputs in float32, `[num_tokens, num_heads, size]`, with a key for each head."""
    query, key, value, log_decay, factor = tokens
    num_shared = value.shape[1] // key.shape[1]
    query, key = (part.float().repeat_interleave(num_shared, dim=1) for part in (query, key))
    return RuleTokens(query, key, value.float(), log_decay.unsqueeze(2), factor.unsqueeze(2))


def _normed(x: torch.Tensor, norm: GatedNorm | None, tokens: slice) -> torch.Tensor:
    """Return the gated norm of the results of some tokens, in float32."""
    if norm is None:
        return x
    x = functional.rms_norm(x, norm.weight.shape, norm.weight.float(), norm.eps)
    return x * functional.silu(norm.z[tokens].float())


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Return vectors of length one in float32."""
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + _EPS).rsqrt()


def _delta_step(tokens: RuleTokens, state: torch.Tensor) -> torch.Tensor:
    """Return the results of one token, `[1, num_heads, value_size]`, and update the state."""
    query, key, value, log_decay, beta = tokens
    current = state.float() * log_decay[0].exp().unsqueeze(2)
    change = beta[0] * (value[0] - (current @ key[0].unsqueeze(2)).squeeze(2))
    return _add_change(query, key, change, current, state)


def _delta_chunks(tokens: RuleTokens, state: torch.Tensor) -> torch.Tensor:
    """Return the results of a segment, `[num_tokens, num_heads, value_size]`, by chunks.

    Within a chunk, the changes of all tokens are the solution of a triangular system, "Gated Delta
    Networks" (Yang et al. 2024). Tokens of zeros fill the last chunk: they change nothing.
    """
    num_tokens = len(tokens.value)
    query, key, value, log_decay, beta = map(_chunks, tokens)
    decay = log_decay.double().cumsum(2)  # [num_heads, num_chunks, CHUNK_SIZE, 1]
    pairs = _pair_decays(decay)
    weighted = key * beta
    system = (weighted @ key.mT).mul_(pairs)
    known = torch.cat((value * beta, weighted * decay.exp().float()), dim=3)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    from_values, from_state = solved.split((value.shape[3], key.shape[3]), dim=3)
    out = _pass_chunks(query, key, from_values, decay, pairs, state, from_state=from_state)
    return out.narrow(0, 0, num_tokens)


def _scan_step(tokens: RuleTokens, state: torch.Tensor) -> torch.Tensor:
    """Return the results of one token, `[1, num_heads, value_size]`, and update the state."""
    c, b, x, log_decay, sizes = tokens
    current = state.float() * log_decay[0].exp().unsqueeze(2)
    return _add_change(c, b, x[0] * sizes[0], current, state)


def _add_change(
    query: torch.Tensor,
    key: torch.Tensor,
    change: torch.Tensor,
    current: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Return the results of one token with a change of the decayed state, which is stored."""
    current.baddbmm_(change.unsqueeze(2), key[0].unsqueeze(1))
    state.copy_(current)
    return (current @ query[0].unsqueeze(2)).squeeze(2).unsqueeze(0)


def _scan_chunks(tokens: RuleTokens, state: torch.Tensor) -> torch.Tensor:
    """Return the results of a segment, `[num_tokens, num_heads, value_size]`, by chunks."""
    c, b, x, log_decay, sizes = tokens
    num_tokens = len(x)
    c, b, x, log_decay = (_chunks(part) for part in (c, b, x * sizes, log_decay))
    decay = log_decay.double().cumsum(2)
    out = _pass_chunks(c, b, x, decay, _pair_decays(decay), state, from_state=None)
    return out.narrow(0, 0, num_tokens)


def _pair_decays(decay: torch.Tensor) -> torch.Tensor:
    """Return the decays from each token to later tokens of its chunk; 0 to earlier tokens."""
    is_later = torch.ones(CHUNK_SIZE, CHUNK_SIZE, dtype=torch.bool, device=decay.device).triu_(1)
    # Float64, as a sum over a chunk is large beside the decay of one token.
    return (decay - decay.mT).float().masked_fill_(is_later, float("-inf")).exp_()


def _pass_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    changes: torch.Tensor,
    decay: torch.Tensor,
    pairs: torch.Tensor,
    state: torch.Tensor,
    *,
    from_state: torch.Tensor | None,
) -> torch.Tensor:
    """Return the results of all chunks, `[tokens of all chunks, num_heads, value_size]`.

    All tensors but the state are `[num_heads, num_chunks, CHUNK_SIZE, size]`. The product of the
    state and `from_state` is subtracted from the changes.
    """
    seen = (query @ key.mT).mul_(pairs)
    query = query * decay.exp().float()
    last = decay[:, :, -1:]
    key = key * (last - decay).exp().float()
    last = last.exp().float()
    out = torch.empty_like(changes)
    current = state.float()
    for i in range(changes.shape[1]):
        change = changes[:, i]
        if from_state is not None:
            change = change - from_state[:, i] @ current.mT
        out[:, i] = query[:, i] @ current.mT + seen[:, i] @ change
        current = current * last[:, i] + change.mT @ key[:, i]
        # As where a segment ends, so that results do not depend on the ends.
        current = current.to(state.dtype).float()
    state.copy_(current)
    return out.permute(1, 2, 0, 3).flatten(0, 1)


def _chunks(x: torch.Tensor) -> torch.Tensor:
    """Return `[num_tokens, num_heads, size]` as `[num_heads, num_chunks, CHUNK_SIZE, size]`."""
    missing = -len(x) % CHUNK_SIZE
    padded = functional.pad(x, (0, 0, 0, 0, 0, missing))
    return padded.view(-1, CHUNK_SIZE, *x.shape[1:]).permute(2, 0, 1, 3).contiguous()
