"""The share of the devices' measured speed that a benchmark has used.

The roofline of a run is the time that its work would take at the measured speed: reading weights
and cached keys and values, or computing, whichever takes longer. Activations are not counted.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedray.rank_roofline import ExpertChoice, RankRoofline

__all__ = [
    "MeasuredRun",
    "RooflineShare",
    "SequenceLengths",
    "UnknownRoofline",
    "share_of_roofline",
]


@dataclass(frozen=True, slots=True)
class SequenceLengths:
    """The tokens of one request."""

    num_prompt: int
    num_cached: int
    """Tokens of the prompt that were not computed."""
    num_output: int

    def num_pairs(self, window: int | None) -> int:
        """Return the pairs of a computed token and a token that it sees, itself included."""
        # The last token is sampled, and never computed.
        return _sum_of_contexts(self.num_cached + 1, self.num_prompt + self.num_output - 1, window)

    def num_cache_reads(self, window: int | None) -> int:
        """Return how often the keys and values of a cached token are read.

        Each generated token but the first reads its context. A prompt reads its cached part once.
        """
        of_prompt = _sum_of_contexts(self.num_cached, self.num_cached, window)
        first, last = self.num_prompt + 1, self.num_prompt + self.num_output - 1
        return of_prompt + _sum_of_contexts(first, last, window)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """Requests that were generated, and how long that took."""

    seconds: float
    num_steps: float
    requests: tuple[SequenceLengths, ...]
    max_step_tokens: int
    """The most tokens that a step computes."""

    @property
    def num_prompt_rows(self) -> int:
        """The tokens of prompts that were computed."""
        return sum(one.num_prompt - one.num_cached for one in self.requests)

    @property
    def num_sampled(self) -> int:
        """Number of generated tokens."""
        return sum(one.num_output for one in self.requests)

    @property
    def num_decode_rows(self) -> int:
        """The generated tokens that were computed, which are all but the last of each request."""
        return self.num_sampled - len(self.requests)

    def expert_steps(self, choice: ExpertChoice) -> float:
        """Return the expected number of times that all experts of a layer are read.

        Prompts are taken to be in as few steps as they fit in, and rows of other steps to be as
        many in each.
        """
        num_first = min(self.num_steps, math.ceil(self.num_prompt_rows / self.max_step_tokens))
        times = 0.0
        for num_steps, num_rows in (
            (num_first, self.num_prompt_rows),
            (self.num_steps - num_first, self.num_decode_rows),
        ):
            if num_steps and num_rows:
                times += num_steps * choice.expected_part(num_rows / num_steps)
        return times


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineShare:
    """The roofline of the rank that is closest to it; bytes, FLOP and times are means of a step."""

    share: float
    """The larger of the next two."""
    memory_share: float
    compute_share: float
    rank: int
    step_ms: float
    weight_bytes_per_step: float
    kv_bytes_per_step: float
    flop_per_step: float
    experts_per_layer: float | None
    """The expected number of which a step reads the weights, if tokens choose all as often."""
    num_experts: int | None
    """Number of experts in each layer; None if the model has none."""
    read_bytes_per_second: float
    """Measured, as the next two."""
    flop_per_second: float
    fp8_flop_per_second: float | None

    def figures(self) -> dict[str, object]:
        """Return the fields by name."""
        return asdict(self)

    def rows(self) -> dict[str, str]:
        """Return lines of a table."""
        weights, cache = self.weight_bytes_per_step / 1e9, self.kv_bytes_per_step / 1e9
        what = "Share of the roofline"
        rows = {
            "Mean step (ms)": f"{self.step_ms:.3f}",
            "Read by a step (GB)": f"{weights:,.3g} of weights, {cache:,.3g} of KV cache",
            "Share of memory bandwidth": f"{self.memory_share:.2f} of the measured "
            f"{self.read_bytes_per_second / 1e9:,.4g} GB/s",
            "Share of compute": f"{self.compute_share:.2f} of the measured {self._compute_text}",
            what: f"{self.share:.2f}",
        }
        if self.experts_per_layer is not None:
            rows["Experts read by a step"] = (
                f"{self.experts_per_layer:.1f} of {self.num_experts} in a layer, if chosen evenly"
            )
        rows[what] = rows.pop(what)
        return rows

    @property
    def _compute_text(self) -> str:
        text = f"{self.flop_per_second / 1e12:,.3g} TFLOP/s"
        if self.fp8_flop_per_second is not None:
            text += f", {self.fp8_flop_per_second / 1e12:,.3g} in fp8"
        return text


@dataclass(frozen=True, slots=True)
class UnknownRoofline:
    """The reason why the share of the roofline is not known."""

    reason: str

    def figures(self) -> dict[str, object]:
        """Return the fields by name."""
        return {"share": None, "reason": self.reason}

    def rows(self) -> dict[str, str]:
        """Return lines of a table."""
        return {"Share of the roofline": f"unknown: {self.reason}"}


def share_of_roofline(run: MeasuredRun, rooflines: Sequence[RankRoofline]) -> RooflineShare:
    """Return the largest share of all ranks."""
    shares = [_rank_share(run, rank, roofline) for rank, roofline in enumerate(rooflines)]
    return max(shares, key=lambda one: one.share)


def _rank_share(run: MeasuredRun, rank: int, roofline: RankRoofline) -> RooflineShare:
    num_rows = run.num_prompt_rows + run.num_decode_rows
    speed = roofline.speed
    weight_bytes = run.num_steps * float(roofline.weights.num_bytes + roofline.sampled.num_bytes)
    experts_per_layer = None
    if roofline.experts is not None:
        times = run.expert_steps(roofline.experts)
        weight_bytes += times * (roofline.weights.expert_bytes + roofline.sampled.expert_bytes)
        experts_per_layer = times / run.num_steps * roofline.experts.num_experts
    kv_bytes, flop = 0.0, 0.0
    for attention in roofline.attention:
        window = attention.window
        kv_bytes += attention.token_bytes * sum(one.num_cache_reads(window) for one in run.requests)
        flop += attention.pair_flop * sum(one.num_pairs(window) for one in run.requests)
    flop += roofline.weights.row_flop * num_rows + roofline.sampled.row_flop * run.num_sampled
    fp8_flop = (
        roofline.weights.fp8_row_flop * num_rows + roofline.sampled.fp8_row_flop * run.num_sampled
    )
    compute_s = flop / speed.flop_per_s
    if speed.fp8_flop_per_s is not None:
        compute_s += fp8_flop / speed.fp8_flop_per_s
    memory_share = (weight_bytes + kv_bytes) / speed.read_bytes_per_s / run.seconds
    return RooflineShare(
        share=max(memory_share, compute_s / run.seconds),
        memory_share=memory_share,
        compute_share=compute_s / run.seconds,
        rank=rank,
        step_ms=run.seconds / run.num_steps * 1e3,
        weight_bytes_per_step=weight_bytes / run.num_steps,
        kv_bytes_per_step=kv_bytes / run.num_steps,
        flop_per_step=(flop + fp8_flop) / run.num_steps,
        experts_per_layer=experts_per_layer,
        num_experts=None if roofline.experts is None else roofline.experts.num_experts,
        read_bytes_per_second=speed.read_bytes_per_s,
        flop_per_second=speed.flop_per_s,
        fp8_flop_per_second=speed.fp8_flop_per_s,
    )


def _sum_of_contexts(first: int, last: int, window: int | None) -> int:
    """Return the sum of `min(context, window)` for contexts from `first` to `last`."""
    if last < first:
        return 0
    if window is None or last <= window:
        return (first + last) * (last - first + 1) // 2
    num_whole = max(0, last - max(first, window) + 1)
    return num_whole * window + _sum_of_contexts(first, min(last, window - 1), None)
