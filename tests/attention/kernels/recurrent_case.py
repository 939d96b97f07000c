"""Inputs of recurrent layers, and their recurrences token by token in float64."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch.nn import functional

from attention.kernels import recurrent
from attention.kernels.arguments import GatedNorm, RuleTokens, ScanGates, Segments
from tests.attention.kernels.kernel_device import DEVICE

NUM_ROWS = 9
STEPS = [
    ([1, 1, 1], [4, -1, 7]),
    ([63, 64, 65], [0, 1, 2]),
    ([129, 1, 70, 1, 2], [8, 3, -1, 5, 0]),
]
"""Lengths and rows: decodes, prefills, both together, and lengths near a chunk's."""
GARBAGE = 1e4
"""In the buffer of states around the states of a layer, which no kernel may touch."""


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    segments: Segments,
) -> torch.Tensor:
    """Return the gated delta rule of each segment without a norm, on any device."""
    if value.is_cuda:
        from attention.kernels.triton import delta_rule as triton_kernels

        gates = log_decay, beta
        return triton_kernels.delta_rule(query, key, value, gates, None, states, segments)
    tokens = RuleTokens(query, key, value, log_decay, beta)
    return recurrent._delta_rule(tokens, None, states, segments)


def segments_of(query_lens: list[int], rows: list[int]) -> Segments:
    """Return the segments of these lengths, which follow each other."""
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    num_prompts = max((place for place, size in enumerate(query_lens, 1) if size > 1), default=0)
    return Segments(
        query_starts=starts.to(torch.int32).to(DEVICE),
        rows=torch.tensor(rows, dtype=torch.int32, device=DEVICE),
        max_query_len=max(query_lens),
        num_prompts=num_prompts,
    )


def state_view(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    """Return random states `[NUM_ROWS, *shape]` within a buffer of larger rows."""
    size = torch.Size(shape).numel()
    buffer = torch.full((NUM_ROWS, size + 64), GARBAGE, dtype=dtype, device=DEVICE)
    view = buffer[:, 32 : 32 + size].view(NUM_ROWS, *shape)
    return view.copy_(scale * torch.randn(NUM_ROWS, *shape))


def has_untouched_surroundings(states: torch.Tensor) -> bool:
    """Return whether the buffer around the states is as `state_view` has made it."""
    stride, size = states.stride(0), states[0].numel()
    buffer = states.as_strided((NUM_ROWS, stride), (stride, 1), 0)
    around = torch.cat((buffer[:, :32], buffer[:, 32 + size :]), dim=1)
    return bool((around == torch.tensor(GARBAGE, dtype=buffer.dtype)).all())


SAVING = [199, 70, 129], [2, -1, 0]
"""Lengths and rows of segments for `saves_equal_cuts`."""


def saves_equal_cuts(
    case: "ConvCase | DeltaCase | ScanCase", run: Callable[[Any], torch.Tensor]
) -> bool:
    """Return whether saved states, and all results, have the bits of segments that end there.

    `run` returns the results of a case, whatever its kind. The last of four saves is before a token
    that is alone in its chunk.
    """
    whole, cut = (replace(case, states=cloned_states(case.states)) for _ in range(2))
    save_ends = torch.tensor([64, -1, 397, 128], dtype=torch.int32, device=DEVICE)
    results = run(replace(whole, segments=replace(case.segments, save_ends=save_ends)))
    parts = []
    for first, end, row, spare in (
        *((0, 64, 2, -4), (64, 128, 2, -1), (128, 199, 2, 2)),
        *((199, 269, -1, -3), (269, 397, 0, -2), (397, 398, 0, 0)),
    ):
        parts.append(run(cut.part(first, end, row)))
        if row >= 0:
            cut.states[spare] = cut.states[row]
    return torch.equal(results, torch.cat(parts)) and torch.equal(whole.states, cut.states)


def chains_equal_decodes(
    case: "ConvCase | DeltaCase | ScanCase", run: Callable[[Any], torch.Tensor]
) -> bool:
    """Return whether chains have the bits of decodes, and only their accepted tokens advance.

    `run` returns the results of a case with the lengths and rows of `CHAINED`. On a GPU, kernels of
    chains round the last bits otherwise.
    """
    decoded = replace(case, states=cloned_states(case.states))
    segments = replace(case.segments, is_chained=True, keeps_states=True, num_prompts=0)
    before = case.states.clone()
    results = run(replace(case, segments=segments))
    is_equal = torch.equal(case.states, before)
    token_ids = torch.arange(len(results), device=DEVICE)
    sampled_ids = token_ids + 1
    starts, (query_lens, rows) = segments.query_starts.tolist(), CHAINED
    for first, query_len, number, row in zip(starts, query_lens, NUM_ACCEPTED, rows, strict=False):
        # Later drafts may be right, but do not count.
        sampled_ids[first + number - 1] = -1
        kept = None
        for token in range(first, first + query_len):
            if token == first + number:
                kept = decoded.states.clone()
            part = run(decoded.part(token, token + 1, row))
            is_equal &= _are_same(part, results[token : token + 1])
        if kept is not None:
            decoded.states.copy_(kept)
    run(replace(case, segments=segments.accepted(token_ids, sampled_ids)))
    return is_equal and _are_same(case.states, decoded.states)


def _are_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    if not first.is_cuda:
        return torch.equal(first, second)
    tolerance = 1e-5 if first.dtype == torch.float32 else 1e-2
    return torch.allclose(first, second, rtol=tolerance, atol=tolerance)


CHAINED = [4, 1, 2, 6, 3], [2, 5, -1, 0, 7]
"""Lengths and rows of chains for `chains_equal_decodes`."""
NUM_ACCEPTED = 3, 1, 1, 6, 1
"""The accepted tokens of each chain, the first included."""


def cloned_states(states: torch.Tensor) -> torch.Tensor:
    """Return a copy of states in a buffer of its own."""
    return state_view(*states.shape[1:], dtype=states.dtype).copy_(states)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeltaCase:
    """The arguments of a gated delta rule."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor
    states: torch.Tensor
    segments: Segments

    @classmethod
    def make(
        cls,
        query_lens: list[int],
        rows: list[int],
        num_key_heads: int = 2,
        num_value_heads: int = 4,
        key_size: int = 16,
        value_size: int = 16,
        *,
        dtype: torch.dtype = torch.float32,
        state_dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Make random arguments; queries, keys and values are views of one matrix."""
        torch.manual_seed(0)
        num_tokens = sum(query_lens)
        num_keys = num_key_heads * key_size
        mixed = torch.randn(num_tokens, 2 * num_keys + num_value_heads * value_size)
        mixed = mixed.to(dtype).to(DEVICE)
        keys = mixed[:, : 2 * num_keys].unflatten(1, (2, num_key_heads, key_size))
        # Decays from almost none to almost everything.
        decay = -torch.exp(6 * torch.rand(num_tokens, num_value_heads, device=DEVICE) - 5)
        return cls(
            query=keys[:, 0],
            # A common part makes keys alike, and the system of a chunk harder to solve.
            key=keys[:, 1].add_(0.5),
            value=mixed[:, 2 * num_keys :].unflatten(1, (num_value_heads, value_size)),
            log_decay=decay,
            beta=torch.rand(num_tokens, num_value_heads, device=DEVICE),
            states=state_view(num_value_heads, value_size, key_size, dtype=state_dtype),
            segments=segments_of(query_lens, rows),
        )

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """The tensors that have an entry for each token."""
        return self.query, self.key, self.value, self.log_decay, self.beta

    def run(self, rule: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Return the results of an implementation, which updates the states."""
        return rule(
            self.query,
            self.key,
            self.value,
            self.log_decay,
            self.beta,
            self.states,
            self.segments,
        )

    def check(self, rule: Callable[..., torch.Tensor]) -> None:
        """Compare an implementation with `exact`."""
        expected, states = self.exact()
        out = self.run(rule)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(self.states.double(), states, rtol=1e-5, atol=1e-5)
        assert has_untouched_surroundings(self.states)

    def check_cuts(self, rule: Callable[..., torch.Tensor], ends: list[int]) -> None:
        """Check that parts of the segment, cut on the grid, give equal bits."""
        cut = self.clone_states()
        expected = self.run(rule)
        parts = [cut.part(first, end, 2) for first, end in zip([0, *ends], ends, strict=False)]
        assert torch.equal(torch.cat([part.run(rule) for part in parts]), expected)
        assert torch.equal(cut.states, self.states)

    def clone_states(self) -> "DeltaCase":
        """Return the case with a copy of the states in a buffer of its own."""
        return replace(self, states=cloned_states(self.states))

    def part(self, first: int, end: int, row: int) -> "DeltaCase":
        """Return a case of some tokens as one segment, with the same states."""
        query, key, value, log_decay, beta = (part[first:end] for part in self.arguments)
        return DeltaCase(
            query=query,
            key=key,
            value=value,
            log_decay=log_decay,
            beta=beta,
            states=self.states,
            segments=segments_of([end - first], [row]),
        )

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the results and the states afterwards, token by token in float64."""
        query, key, value, log_decay, beta = (part.double() for part in self.arguments)
        num_shared = value.shape[1] // key.shape[1]
        query, key = (part.repeat_interleave(num_shared, dim=1) for part in (query, key))
        query, key = (
            part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key)
        )
        out = torch.zeros_like(value)
        states = self.states.double()
        for row, first, end in self.segments.spans():
            state = states[row]
            for token in range(first, end):
                state *= log_decay[token].exp()[:, None, None]
                change = value[token] - torch.einsum("hvk,hk->hv", state, key[token])
                change *= beta[token, :, None]
                state += change[:, :, None] * key[token, :, None]
                out[token] = torch.einsum("hvk,hk->hv", state, query[token])
        return out * query.shape[2] ** -0.5, states


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConvCase:
    """The arguments of a causal convolution."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    states: torch.Tensor
    segments: Segments

    @classmethod
    def make(
        cls,
        query_lens: list[int],
        rows: list[int],
        *,
        num_channels: int = 40,
        width: int = 4,
        has_bias: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Make random arguments; tokens are strided."""
        torch.manual_seed(0)
        x = torch.randn(sum(query_lens), num_channels + 8)[:, :num_channels]
        return cls(
            x=x.to(dtype).to(DEVICE),
            weight=torch.randn(num_channels, width).to(dtype).to(DEVICE),
            bias=torch.randn(num_channels).to(dtype).to(DEVICE) if has_bias else None,
            states=state_view(width - 1, num_channels, dtype=dtype),
            segments=segments_of(query_lens, rows),
        )

    def check(
        self,
        conv: Callable[..., torch.Tensor],
        activation: Literal["silu"] | None,
        *,
        rtol: float = 1e-5,
        atol: float = 1e-5,
    ) -> None:
        """Compare an implementation with `exact`."""
        expected, states = self.exact(activation)
        out = conv(self.x, self.weight, self.bias, self.states, self.segments, activation)
        torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol)
        assert torch.equal(self.states.double(), states)
        assert has_untouched_surroundings(self.states)

    def part(self, first: int, end: int, row: int) -> "ConvCase":
        """Return a case of some tokens as one segment, with the same states."""
        segments = segments_of([end - first], [row])
        return replace(self, x=self.x[first:end], segments=segments)

    def exact(self, activation: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the results and the states afterwards, in float64."""
        out = torch.zeros_like(self.x, dtype=torch.float64)
        states = self.states.double()
        num_channels, width = self.weight.shape
        weight = self.weight.double().unsqueeze(1)
        bias = None if self.bias is None else self.bias.double()
        for row, first, end in self.segments.spans():
            inputs = torch.cat((states[row], self.x[first:end].double()))
            sums = functional.conv1d(inputs.t(), weight, bias, groups=num_channels).t()
            out[first:end] = functional.silu(sums) if activation == "silu" else sums
            states[row] = inputs[len(inputs) - width + 1 :]
        return out, states


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScanCase:
    """The arguments of a selective scan."""

    x: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    gates: ScanGates
    states: torch.Tensor
    segments: Segments

    @classmethod
    def make(
        cls,
        query_lens: list[int],
        rows: list[int],
        num_groups: int = 2,
        num_heads: int = 4,
        head_size: int = 16,
        state_size: int = 16,
        *,
        dtype: torch.dtype = torch.float32,
        state_dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Make random arguments; x, b and c are views of one matrix."""
        torch.manual_seed(0)
        num_tokens, num_states = sum(query_lens), num_groups * state_size
        mixed = torch.randn(num_tokens, num_heads * head_size + 2 * num_states)
        mixed = mixed.to(dtype).to(DEVICE)
        x, b, c = mixed.split((num_heads * head_size, num_states, num_states), dim=1)
        parameters = torch.randn(3, num_heads, device=DEVICE)
        return cls(
            x=x.unflatten(1, (num_heads, head_size)),
            b=b.unflatten(1, (num_groups, state_size)),
            c=c.unflatten(1, (num_groups, state_size)),
            gates=ScanGates(
                dt=torch.randn(num_tokens, num_heads + 1).to(dtype).to(DEVICE)[:, :num_heads],
                a_log=parameters[0],
                dt_bias=parameters[1] - 3,
                d=parameters[2],
            ),
            states=state_view(num_heads, head_size, state_size, dtype=state_dtype),
            segments=segments_of(query_lens, rows),
        )

    def part(self, first: int, end: int, row: int) -> "ScanCase":
        """Return a case of some tokens as one segment, with the same states."""
        return replace(
            self,
            x=self.x[first:end],
            b=self.b[first:end],
            c=self.c[first:end],
            gates=replace(self.gates, dt=self.gates.dt[first:end]),
            segments=segments_of([end - first], [row]),
        )

    def run(self, scan: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Return the results of an implementation, which updates the states."""
        return scan(self.x, self.b, self.c, self.gates, self.states, self.segments)

    def check(self, scan: Callable[..., torch.Tensor]) -> None:
        """Compare an implementation with `exact`."""
        expected, states = self.exact()
        out = self.run(scan)
        # Decays between tokens are differences of sums, in which large decays come first.
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(self.states.double(), states, rtol=1e-4, atol=1e-4)
        assert has_untouched_surroundings(self.states)

    def check_cuts(self, scan: Callable[..., torch.Tensor]) -> None:
        """Check that parts of a segment of 193 tokens, cut on the grid, give equal bits."""
        cut = replace(self, states=state_view(*self.states.shape[1:], dtype=self.states.dtype))
        cut.states.copy_(self.states)
        expected = self.run(scan)
        parts = [cut.part(first, end, 2) for first, end in ((0, 64), (64, 192), (192, 193))]
        assert torch.equal(torch.cat([part.run(scan) for part in parts]), expected)
        assert torch.equal(cut.states, self.states)

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the results and the states afterwards, token by token in float64."""
        x, b, c = self.x.double(), self.b.double(), self.c.double()
        b, c = (part.repeat_interleave(x.shape[1] // b.shape[1], dim=1) for part in (b, c))
        gates = self.gates
        sizes = functional.softplus(gates.dt.double() + gates.dt_bias.double())
        decays = (-gates.a_log.double().exp() * sizes).exp()
        out = torch.zeros_like(x)
        states = self.states.double()
        for row, first, end in self.segments.spans():
            state = states[row]
            for token in range(first, end):
                state *= decays[token, :, None, None]
                added = sizes[token, :, None] * x[token]
                state += added[:, :, None] * b[token, :, None]
                out[token] = torch.einsum("hpn,hn->hp", state, c[token])
                out[token] += gates.d.double()[:, None] * x[token]
        return out, states


def check_grouped_norm(
    norm: Callable[..., torch.Tensor | None], num_heads: int, size: int, *, gates_first: bool
) -> None:
    """Compare a norm of heads with their own weights, maybe in place, with torch in float64."""
    torch.manual_seed(0)
    x, z, _ = torch.randn(3, 5, num_heads, size, device=DEVICE)
    weight = torch.randn(num_heads, size, device=DEVICE)
    gates = functional.silu(z.double())
    values = x.double() * gates if gates_first else x.double()
    expected = functional.rms_norm(values, (size,), None, 0.01) * weight
    expected = expected if gates_first else expected * gates
    out = norm(x, GatedNorm(z=z, weight=weight, eps=0.01), gates_first=gates_first)
    result = x if out is None else out
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
