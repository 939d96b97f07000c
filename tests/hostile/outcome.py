"""How a server fared under an attack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.hostile.attack import Attack, Findings
from tests.hostile.engine_load import EngineGaps
from tests.hostile.health_probe import Probed
from tests.hostile.honest_tenant import Streamed
from tests.load.report import times_ms

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TABLE_HEAD", "Outcome", "Period"]

TABLE_HEAD = f"{'attack':28} {'gap p99 ms':>18} {'health p99 ms':>20} {'RSS MiB':>16}  held"

_MAX_GAP_RATIO = 5.0
_MAX_HEALTH_P99_MS = 250.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """The results of honest clients in a period."""

    streamed: Streamed
    probed: Probed

    def gap_p99_ms(self) -> float:
        """Return the 99th percentile of the tenant's time between tokens."""
        return times_ms(self.streamed.gaps_s).get("p99_ms", 0.0)

    def health_p99_ms(self) -> float:
        """Return the 99th percentile of a health check's time."""
        return times_ms(self.probed.seconds).get("p99_ms", 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """An attack's figures, and what did not hold."""

    attack: Attack
    server_command: str
    """The equivalent shell command."""
    findings: Findings
    before: Period
    beside: Period
    rss_before_mib: float
    rss_peak_mib: float
    rss_after_mib: float
    num_log_lines: int
    """Written during the attack and after it."""
    num_tracebacks: int
    engine: EngineGaps | None = None
    """The same work in process, for attacks that are valid work of the model."""

    def damage(self) -> list[str]:
        """Return what did not hold, except times and memory afterwards, as sentences."""
        attack = self.attack
        found = list(self.findings.broken)
        found += [f"The honest tenant lost a request: {text}" for text in self._lost()[:3]]
        failed = self.beside.probed.failed
        if len(failed) > attack.max_failed_checks and attack.is_bounded:
            found.append(f"{len(failed)} health checks failed, such as: {failed[0]}")
        growth_mib = self.rss_peak_mib - self.rss_before_mib
        if growth_mib > attack.max_growth_mib and attack.is_bounded:
            found.append(f"Memory grew by {growth_mib:.0f} MiB.")
        if self.num_log_lines > attack.max_log_lines:
            found.append(f"The server logged {self.num_log_lines} lines.")
        if self.num_tracebacks:
            found.append(f"The log has {self.num_tracebacks} tracebacks.")
        return found

    def excesses(self) -> list[str]:
        """Return what health checks took, and memory held, beyond their limits, as sentences."""
        found = list[str]()
        if not self.attack.is_bounded:
            return found
        if self.beside.health_p99_ms() > _MAX_HEALTH_P99_MS:
            found.append(f"Health checks took {self.beside.health_p99_ms()} ms (p99).")
        left_mib = self.rss_after_mib - self.rss_before_mib
        if left_mib > self.attack.max_left_mib:
            found.append(f"{left_mib:.0f} MiB were still held after the attack.")
        return found

    def gap_ratio(self) -> float:
        """Return how much longer the time between tokens was beside the attack (p99)."""
        return self.beside.gap_p99_ms() / self.before.gap_p99_ms()

    def delays(self) -> list[str]:
        """Return a sentence if the time between tokens did not hold."""
        before, beside = self.before.gap_p99_ms(), self.beside.gap_p99_ms()
        if self.gap_ratio() <= _MAX_GAP_RATIO or not self.attack.is_bounded:
            return []
        text = f"The time between tokens rose from {before} to {beside} ms (p99)."
        if self.engine is None:
            return [text]
        # What other tenants' valid work takes of the model is theirs.
        alone, loaded = (
            times_ms(gaps_s).get("p99_ms", 0.0)
            for gaps_s in (self.engine.before_s, self.engine.beside_s)
        )
        if self.gap_ratio() <= _MAX_GAP_RATIO * loaded / alone:
            return []
        return [f"{text} In process it rose from {alone} to {loaded} ms."]

    def figures(self) -> dict[str, object]:
        """Return everything for the report."""
        engine = {}
        if self.engine is not None:
            engine = {
                "engine_gaps_before": times_ms(self.engine.before_s),
                "engine_gaps_beside": times_ms(self.engine.beside_s),
            }
        return {
            **engine,
            "server": self.server_command,
            "attack": dict(self.findings.figures),
            "gaps_before": times_ms(self.before.streamed.gaps_s),
            "gaps_beside": times_ms(self.beside.streamed.gaps_s),
            "first_token_before": times_ms(self.before.streamed.first_s),
            "first_token_beside": times_ms(self.beside.streamed.first_s),
            "health_before": times_ms(self.before.probed.seconds),
            "health_beside": times_ms(self.beside.probed.seconds),
            "requests_beside": self.beside.streamed.num_requests,
            "rss_mib": [
                round(mib) for mib in (self.rss_before_mib, self.rss_peak_mib, self.rss_after_mib)
            ],
            "log_lines": self.num_log_lines,
        }

    def row(self, not_held: Sequence[str]) -> str:
        """Return a line of the table whose head is `TABLE_HEAD`."""
        rss = f"{self.rss_before_mib:.0f}/{self.rss_peak_mib:.0f}/{self.rss_after_mib:.0f}"
        gaps = f"{self.before.gap_p99_ms()} -> {self.beside.gap_p99_ms()}"
        health = f"{self.before.health_p99_ms()} -> {self.beside.health_p99_ms()}"
        held = "; ".join(not_held) or "yes"
        return f"{self.attack.name:28} {gaps:>18} {health:>20} {rss:>16}  {held}"

    def _lost(self) -> list[str]:
        return self.before.streamed.lost + self.beside.streamed.lost
