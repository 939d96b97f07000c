"""Requests of a simulation: drawn at random, or read from a trace."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from cluster.simulation.step_cost import MOST_TOKENS
from pagedray.errors import InvalidRequestError, StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Arrival", "Workload", "read_trace"]

_LATEST_S = 1e8
_MOST_SHOWN = 80
"""Characters of a line that an error shows."""
_MOST_REASON = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request as a trace describes it."""

    arrival_s: float
    """When it arrives, from the start of the simulation."""
    num_prompt_tokens: int
    num_output_tokens: int
    """Tokens to generate, which is also the limit of the request."""
    tenant: str = ""
    prefix: str = ""
    """Requests with the same one begin with the same tokens; empty if nothing is shared."""
    num_prefix_tokens: int = 0
    """Tokens of the prompt that are the prefix."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.arrival_s <= _LATEST_S:
            raise ValueError(f"arrival_s must be from 0 to {_LATEST_S:g}")
        for name in ("num_prompt_tokens", "num_output_tokens"):
            if not 1 <= getattr(self, name) <= MOST_TOKENS:
                raise ValueError(f"{name} must be from 1 to {MOST_TOKENS}")
        if not 0 <= self.num_prefix_tokens <= self.num_prompt_tokens:
            raise ValueError("num_prefix_tokens must be from 0 to num_prompt_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests at random times; equal workloads give equal requests."""

    num_requests: int
    request_rate: float
    """Requests per second, a Poisson process; infinite if all arrive at once."""
    input_len: int
    """Tokens of a prompt besides its prefix."""
    output_len: int
    range_ratio: float = 0.0
    """Lengths are uniform in [length * (1 - ratio), length * (1 + ratio)]."""
    prefix_len: int = 0
    num_prefixes: int = 1
    num_tenants: int = 1
    seed: int = 0

    def arrivals(self) -> list[Arrival]:
        """Return the requests, by time. Raises ValueError if a request is too long or too late."""
        draws = random.Random(self.seed)
        arrivals, now_s = [], 0.0
        for _ in range(self.num_requests):
            prefix = draws.randrange(self.num_prefixes)
            tenant = draws.randrange(self.num_tenants)
            arrivals.append(
                Arrival(
                    arrival_s=now_s,
                    num_prompt_tokens=self.prefix_len + self._draw(self.input_len, draws),
                    num_output_tokens=self._draw(self.output_len, draws),
                    tenant=f"tenant {tenant}",
                    prefix=f"prefix {prefix}" if self.prefix_len else "",
                    num_prefix_tokens=self.prefix_len,
                )
            )
            if math.isfinite(self.request_rate):
                now_s += draws.expovariate(self.request_rate)
        return arrivals

    def _draw(self, length: int, draws: random.Random) -> int:
        low, high = length * (1.0 - self.range_ratio), length * (1.0 + self.range_ratio)
        return max(1, draws.randint(int(low), int(high)))


def read_trace(path: Path) -> Sequence[Arrival]:
    """Return the requests of a file of JSON lines, by time.

    Raises PagedRayError. The fields of a line are the fields of `Arrival`; empty lines are skipped.
    """
    decoder = msgspec.json.Decoder(_TraceLine)
    arrivals = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    arrivals.append(decoder.decode(line).as_arrival())
                except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
                    # It may repeat a name of the line.
                    reason = " ".join(str(error).split())[:_MOST_REASON]
                    raise InvalidRequestError(
                        f"Line {number} of {path} is not a valid request: {reason}, in "
                        f"{line.decode(errors='replace').strip()[:_MOST_SHOWN]!r}."
                    ) from error
    except OSError as error:
        raise StartupError(f"Cannot read the trace {path}: {error.strerror}.") from error
    if not arrivals:
        raise StartupError(f"The trace {path} has no requests.")
    return sorted(arrivals, key=lambda arrival: arrival.arrival_s)


class _TraceLine(msgspec.Struct, forbid_unknown_fields=True):
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    tenant: str = ""
    prefix: str = ""
    num_prefix_tokens: int = 0

    def as_arrival(self) -> Arrival:
        """Return the arrival of the line. Raises ValueError if its values are invalid."""
        return Arrival(**msgspec.structs.asdict(self))
