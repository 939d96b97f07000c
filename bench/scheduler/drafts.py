"""Tokens per second in virtual time with drafts: the speculator against fixed numbers of drafts.

    python -m bench.scheduler.drafts

Requests run together on a model with the costs of Llama-8B on an H200, where steps of one row and
of 8, 16 and 64 rows were measured (bench/results/account_few_rows.json). Each draft is right with
the same probability. A fixed number of drafts is that of every sequence in every step. Before a
plan that waits for tokens, ranks are idle for `--gap-ms`, and its step takes `--launch-ms` longer.
The first step of a number of rows takes `--capture-ms` longer. With `--head`, a draft head makes up
to four drafts, which take `--guess-ms` in each step.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from cluster.scheduling.kv_manager import KvOptions
from cluster.scheduling.speculation import Speculator
from cluster.simulation.step_cost import LLAMA_8B_H200, StepCost
from cluster.simulation.virtual_replica import VirtualDrafter, VirtualHead, VirtualReplica
from pagedray.config import SchedulerConfig, SpeculationConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.scheduling.sequence import Sequence as ScheduledSequence

__all__ = ["COST", "Comparison", "Setting", "compare"]

_MEASURED = StepCost(
    points=((1, 4.14e-3), (8, 4.3e-3), (16, 4.37e-3), (64, 4.9e-3), (256, 8.7e-3), (2048, 46.3e-3))
)
_GRAPHS = (1, 2, 4, *range(8, 2049, 8))
"""Steps take as long as with the next of these numbers of rows."""
COST = msgspec.structs.replace(
    LLAMA_8B_H200,
    points=tuple(
        (number, _MEASURED.tokens_s(largest))
        for before, largest in pairwise((0, *_GRAPHS))
        for number in sorted({before + 1, largest})
    ),
)
_FIXED = {False: (0, 1, 2, 3, 4, 8), True: (0, 1, 2, 3, 4)}
"""Numbers of drafts, without and with a draft head."""
_NUM_TOKENS = 40_000
"""Tokens of all requests together, of at least 300 each."""


class _FixedDrafts(Speculator):
    """Buys all drafts that there is room for."""

    def is_worth_waiting(self, running: Sequence[ScheduledSequence], *, room: int) -> bool:
        return True

    def _do_guesses_pay(self, num_sequences: int, num_guessed: int, room: int) -> bool:
        return True

    def _chosen(self, offers: Sequence[object], *, num_rows: int, room: int) -> list[int]:
        return [self._num_drafts] * len(offers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What drafts cost, and how often they are right."""

    acceptance: float
    """How likely a draft is right, if all before it are."""
    gap_s: float = 0.0004
    launch_s: float = 0.0
    capture_s: float = 0.0
    guess_s: float | None = None
    """Time in which a draft head guesses tokens; None is other drafts, which take no time."""

    @property
    def has_head(self) -> bool:
        """Whether a draft head makes the drafts."""
        return self.guess_s is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Tokens per second of the same requests."""

    fixed: dict[int, float]
    """By number of drafts."""
    adaptive: float

    @property
    def best(self) -> int:
        """The best fixed number of drafts."""
        return max(self.fixed, key=self.fixed.__getitem__)

    @property
    def ratio(self) -> float:
        """The adaptive rate over the best fixed rate."""
        return self.adaptive / self.fixed[self.best]


def compare(num_requests: int, setting: Setting, *, num_tokens: int = _NUM_TOKENS) -> Comparison:
    """Return the rates of requests that run together."""
    num_output_tokens = min(max(300, num_tokens // num_requests), 2000)
    fixed = {
        number: _rate(num_requests, num_output_tokens, setting, _FixedDrafts, number)
        for number in _FIXED[setting.has_head]
    }
    adaptive = _rate(num_requests, num_output_tokens, setting, Speculator, max(fixed))
    return Comparison(fixed=fixed, adaptive=adaptive)


def _rate(
    num_requests: int,
    num_output_tokens: int,
    setting: Setting,
    kind: type[Speculator],
    num_drafts: int,
) -> float:
    speculator, head = None, None
    if num_drafts and setting.has_head:
        head = VirtualHead(acceptance=setting.acceptance)
        speculator = kind(SpeculationConfig(method="eagle3", num_speculative_tokens=num_drafts))
    elif num_drafts:
        config = SpeculationConfig(num_speculative_tokens=num_drafts)
        speculator = kind(config, VirtualDrafter(acceptance=setting.acceptance))
    replica = VirtualReplica(
        SchedulerConfig(max_num_seqs=1024, max_num_batched_tokens=8192),
        KvOptions(block_size=16, num_blocks=60_000, num_cpu_blocks=0),
        msgspec.structs.replace(
            COST,
            gap_s=setting.gap_s,
            launch_s=setting.launch_s,
            capture_s=setting.capture_s,
            guess_s=setting.guess_s or 0.0,
        ),
        max_model_len=4000,
        speculator=speculator,
        head=head,
    )
    for number in range(num_requests):
        replica.submit([1000 + number] * 100, num_output_tokens=num_output_tokens)
    replica.run()
    return replica.num_generated_tokens / replica.now_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.0, 0.3, 0.5, 0.8])
    parser.add_argument("--gap-ms", type=float, default=0.4)
    parser.add_argument("--launch-ms", type=float, default=0.0)
    parser.add_argument("--capture-ms", type=float, default=0.0)
    parser.add_argument("--guess-ms", type=float, default=0.92)
    parser.add_argument("--head", action="store_true")
    options = parser.parse_args()
    print(
        "| requests | right | tok/s without | best fixed number | tok/s | adaptive, tok/s | ratio |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for num_requests in options.requests:
        for acceptance in options.acceptance:
            setting = Setting(
                acceptance=acceptance,
                gap_s=options.gap_ms / 1e3,
                launch_s=options.launch_ms / 1e3,
                capture_s=options.capture_ms / 1e3,
                guess_s=options.guess_ms / 1e3 if options.head else None,
            )
            found = compare(num_requests, setting)
            rates = f"{found.fixed[0]:.0f} | {found.best} | {found.fixed[found.best]:.0f}"
            adaptive = f"{found.adaptive:.0f} | {found.ratio:.3f}"
            print(f"| {num_requests} | {acceptance} | {rates} | {adaptive} |", flush=True)


if __name__ == "__main__":
    main()
