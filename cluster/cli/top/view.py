"""The view of `pagedray top`: a picture of two readings of a server's load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cluster.cli.top.cells import number_text, part_text, plain_text, seconds_text
from cluster.cli.top.history_tables import NUM_PLOTS, latency_table, plot_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from cluster.cli.top.loads_client import ServerName
    from cluster.serving.server_info import CallInfo, ServerLoads
    from cluster.serving.telemetry.load_history import LoadHistory

__all__ = ["TopView", "rates_of"]

_MAX_BAR = 60
_MAX_ROW_HEIGHT = 4
_MIN_CALLS = 8
_MIN_SPACED_HEIGHT = 22
_NO_HISTORY = "Totals, history and latencies require the API key of an admin."


class TopView:
    """One frame of the display, in the size of the terminal."""

    def __init__(
        self,
        url: str,
        loads: ServerLoads | None,
        *,
        before: ServerLoads | None = None,
        history: LoadHistory | None = None,
        name: ServerName | None = None,
        error: str = "",
    ) -> None:
        """`before` is an earlier reading; without `history` there are no plots and latencies."""
        words = ("PagedRay", name.version, name.model) if name is not None else ("PagedRay",)
        self._title = " ".join(word for word in (*words, url) if word)
        self._loads = loads
        self._before = before
        self._history = history
        self._error = error

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.height or console.height
        is_ascii = not options.encoding.startswith("utf")
        panel = Panel(
            self._body(options.max_width - 4, height, is_ascii=is_ascii),
            title=plain_text(f" {self._title} ", "bold"),
            subtitle=Text(" q quits ", style="dim"),
            title_align="left",
            subtitle_align="right",
            box=box.ASCII if is_ascii else box.ROUNDED,
            border_style="cyan",
            height=height,
        )
        for segment in console.render(panel, options):
            if is_ascii:
                # Rich writes an ellipsis for text that it cuts.
                text = segment.text.replace("…", ".").encode("ascii", "replace").decode()
                segment = segment._replace(text=text)
            yield segment

    def _body(self, width: int, height: int, *, is_ascii: bool) -> RenderableType:
        problem = [plain_text(self._error, "bold red")] if self._error else []
        loads = self._loads
        if loads is None:
            return Group(*(problem or [Text("Connecting ...", style="dim")]))
        rates = rates_of(loads, self._before)
        parts: list[RenderableType] = [
            Group(*problem, _state(loads, rates, width)),
            _pools(loads, width),
        ]
        num_blank = 1 if height >= _MIN_SPACED_HEIGHT else 0
        # The border, the parts above, the heading of the calls, and the blank lines.
        room = height - 2 - len(problem) - 4 - 1 - 2 * num_blank
        if self._history is None:
            parts.append(_speeds(rates, "" if problem else _NO_HISTORY))
            room -= 3
        else:
            latencies: RenderableType = Text("No calls yet.", style="dim")
            room -= NUM_PLOTS + 1 + 1 + num_blank
            if loads.num_generated_tokens or loads.calls:
                latencies = table = latency_table(self._history)
                room -= table.row_count
            row_height = 1 + max(0, min(_MAX_ROW_HEIGHT - 1, (room - _MIN_CALLS) // NUM_PLOTS))
            room -= NUM_PLOTS * (row_height - 1)
            plots = plot_table(
                loads,
                rates,
                self._history,
                width=width,
                row_height=row_height,
                is_ascii=is_ascii,
            )
            parts += [plots, latencies]
        parts.append(_calls(loads.calls, max(0, room)))
        blanks = [Text()] * num_blank
        return Group(parts[0], *(one for part in parts[1:] for one in (*blanks, part)))


def _state(loads: ServerLoads, rates: tuple[float, float, float], width: int) -> Group:
    """Return two lines, without the fields for which there is no room."""
    state = ("ready", "bold green") if loads.is_ready else ("not ready", "bold red")
    lines = (
        [
            Text.assemble(state),
            _field("up", seconds_text(loads.uptime_s)),
            _field("running", str(loads.num_running)),
            _field("waiting", str(loads.num_waiting)),
            _field("swapped", str(loads.num_swapped)),
            _field("preemptions", str(loads.num_preemptions)),
        ],
        [
            _field("queued", f"{loads.num_queued_requests} ({loads.num_queued_tokens} tokens)"),
            _field("steps/s", number_text(rates[2])),
            _field("last step", seconds_text(loads.last_step_s)),
            _field("prefix hits", part_text(loads.num_hit_tokens, loads.num_queried_tokens)),
        ],
    )
    return Group(*(_joined(fields, width) for fields in lines))


def _field(name: str, value: str) -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, "bold"))


def _joined(fields: Sequence[Text], width: int) -> Text:
    line = fields[0]
    for field in fields[1:]:
        if line.cell_len + 2 + field.cell_len > width:
            break
        line = Text.assemble(line, "  ", field)
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _speeds(rates: tuple[float, float, float], note: str) -> Group:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", style="bold", no_wrap=True)
    table.add_row("generated tokens/s", number_text(rates[0]))
    table.add_row("prompt tokens/s", number_text(rates[1]))
    return Group(table, Text(note, "dim", no_wrap=True, overflow="ellipsis"))


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
        table.add_row(name, bar, f"{num_used} of {size}{cached} {part_text(num_used, size)}")
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
        table.add_row(plain_text(call.id), seconds_text(call.age_s), *counts)
    if len(shown) < len(calls):
        table.add_row(Text(f"and {len(calls) - len(shown)} more", style="dim"))
    return table


def _bar(num_used: int, num_cached: int, size: int, width: int) -> Text:
    num_full = round(width * num_used / size) if size else 0
    num_known = min(round(width * num_cached / size) if size else 0, width - num_full)
    rest = width - num_full - num_known
    # Distinguishable without colors too.
    return Text.assemble(
        ("[", "dim"),
        ("#" * num_full, "cyan"),
        (":" * num_known, "blue"),
        ("." * rest, "dim"),
        ("]", "dim"),
    )
