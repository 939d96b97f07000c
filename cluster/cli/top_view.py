"""The view of `pagedray top`: a picture of two readings of a server's load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from cluster.serving.server_info import CallInfo, ServerLoads

__all__ = ["TopView", "rates_of"]

_SPARKS = " .:-=+*#"
_MAX_BAR = 60
_NUM_FIXED_LINES = 13


class TopView:
    """One picture, of the size of the terminal."""

    def __init__(
        self,
        url: str,
        loads: ServerLoads | None,
        before: ServerLoads | None,
        *,
        history: Sequence[float] = (),
        error: str = "",
    ) -> None:
        """`before` is an earlier reading, `history` past rates in tokens per second."""
        self._url = url
        self._loads = loads
        self._before = before
        self._history = history
        self._error = error

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.height or console.height
        yield Panel(
            self._body(options.max_width - 4, height),
            title=Text(f" PagedRay {self._url} ", style="bold"),
            subtitle=Text(" q quits ", style="dim"),
            title_align="left",
            subtitle_align="right",
            box=box.ROUNDED if options.encoding.startswith("utf") else box.ASCII,
            border_style="cyan",
            height=height,
        )

    def _body(self, width: int, height: int) -> RenderableType:
        problem = [_plain(self._error, "bold red")] if self._error else []
        if self._loads is None:
            return Group(*(problem or [Text("Connecting ...", style="dim")]))
        num_calls = max(0, height - _NUM_FIXED_LINES - len(problem))
        return Group(
            *problem,
            self._head(self._loads),
            Text(),
            self._speeds(self._loads, width),
            Text(),
            _pools(self._loads, width),
            Text(),
            _calls(self._loads.calls, num_calls),
        )

    def _head(self, loads: ServerLoads) -> Text:
        state = ("ready", "bold green") if loads.is_ready else ("not ready", "bold red")
        text = Text.assemble(state, no_wrap=True, overflow="ellipsis")
        for name, value in (
            ("up", _seconds(loads.uptime_s)),
            ("running", str(loads.num_running)),
            ("waiting", str(loads.num_waiting)),
            ("swapped", str(loads.num_swapped)),
            ("queued", f"{loads.num_queued_requests} ({loads.num_queued_tokens} tokens)"),
        ):
            text.append(f"   {name} ", "dim").append(value, "bold")
        return text

    def _speeds(self, loads: ServerLoads, width: int) -> Table:
        generated, prompt, steps = rates_of(loads, self._before)
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(justify="right", style="bold", no_wrap=True)
        table.add_column(no_wrap=True, style="cyan", overflow="crop")
        table.add_row("generated tokens/s", _number(generated), _spark(self._history, width - 36))
        table.add_row("prompt tokens/s", _number(prompt))
        table.add_row("steps/s", _number(steps), f"last {_seconds(loads.last_step_s)}")
        hits = _part(loads.num_hit_tokens, loads.num_queried_tokens)
        table.add_row("prefix hits", hits, f"{loads.num_preemptions} preemptions")
        return table


def rates_of(loads: ServerLoads, before: ServerLoads | None) -> tuple[float, float, float]:
    """Return generated tokens, prompt tokens and steps per second between two readings."""
    passed_s = 0.0 if before is None else loads.uptime_s - before.uptime_s
    # Negative: the server was restarted.
    if before is None or passed_s <= 0.0:
        return 0.0, 0.0, 0.0
    gains = (
        loads.num_generated_tokens - before.num_generated_tokens,
        loads.num_prompt_tokens - before.num_prompt_tokens,
        loads.num_steps - before.num_steps,
    )
    generated, prompt, steps = (max(0, gain) / passed_s for gain in gains)
    return generated, prompt, steps


def _pools(loads: ServerLoads, width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for name, size, num_free, num_cached in (
        ("blocks on device", loads.num_blocks, loads.num_free_blocks, loads.num_cached_blocks),
        ("blocks on CPU", loads.num_cpu_blocks, loads.num_free_cpu_blocks, 0),
    ):
        num_used = size - num_free
        bar = _bar(num_used, num_cached, size, max(4, min(_MAX_BAR, width - 58)))
        cached = f", {num_cached} cached" if num_cached else ""
        table.add_row(name, bar, f"{num_used} of {size}{cached} {_part(num_used, size)}")
    return table


def _calls(calls: Sequence[CallInfo], num_lines: int) -> RenderableType:
    if not calls:
        return Text("No open calls.", style="dim")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    table.add_column("call", no_wrap=True, overflow="ellipsis", ratio=1)
    for title in ("age", "prompt tokens", "generated tokens"):
        table.add_column(title, justify="right", no_wrap=True)
    shown = calls if len(calls) <= num_lines else calls[: max(0, num_lines - 1)]
    for call in shown:
        counts = (str(call.num_prompt_tokens), str(call.num_generated_tokens))
        table.add_row(_plain(call.id), _seconds(call.age_s), *counts)
    if len(shown) < len(calls):
        table.add_row(Text(f"and {len(calls) - len(shown)} more", style="dim"))
    return table


def _plain(text: str, style: str = "") -> Text:
    """Return text without control characters, which could move the cursor."""
    return Text("".join(char if char.isprintable() else "?" for char in text), style)


def _bar(num_used: int, num_cached: int, size: int, width: int) -> Text:
    num_full = round(width * num_used / size) if size else 0
    num_known = min(round(width * num_cached / size) if size else 0, width - num_full)
    rest = width - num_full - num_known
    # Distinguishable without colours too.
    return Text.assemble(
        ("[", "dim"),
        ("#" * num_full, "cyan"),
        (":" * num_known, "blue"),
        ("." * rest, "dim"),
        ("]", "dim"),
    )


def _spark(rates: Sequence[float], width: int) -> str:
    shown = list(rates)[-max(1, width) :]
    top = max(shown, default=0.0)
    if top <= 0.0:
        return ""
    return "".join(_SPARKS[round(rate / top * (len(_SPARKS) - 1))] for rate in shown)


def _number(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _part(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {int(seconds) % 60} s"
    return f"{minutes // 60} h {minutes % 60} min"
