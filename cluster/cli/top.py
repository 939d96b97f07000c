"""`pagedray top`: a live view of a server's load in the terminal, until q or Ctrl-C."""

from __future__ import annotations

import os
import queue
import select
import sys
import termios
import threading
import tty
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cluster.cli.server_connection import ForbiddenError, ServerConnection, printable
from cluster.serving.server_info import CallInfo, ServerLoads
from cluster.serving.telemetry.load_history import LoadHistory, LoadSample
from pagedray.errors import EngineError, StartupError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from rich.console import ConsoleOptions, RenderableType, RenderResult

__all__ = ["LoadsClient", "Reading", "ServerName", "TopView", "draw_plot", "top"]

_LOOK_S = 0.1
_PRINTED_LINES = 24
_END_KEYS = frozenset(b"qQ\x04")
_SPAN_S = 600.0
_BAR_WIDTH = 24
_NO_HISTORY = "Totals, history and latencies require the API key of an admin."


class ServerName(msgspec.Struct, frozen=True):
    """Which model and version of PagedRay a server runs."""

    model: str = ""
    version: str = ""


_UNNAMED = ServerName()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The load of a server, or the error of the last attempt to read the load."""

    loads: ServerLoads | None = None
    before: ServerLoads | None = None
    """The reading before, for rates."""
    history: LoadHistory | None = None
    """None if the key may not read the history."""
    name: ServerName = _UNNAMED
    error: str = ""

    def rate(self, field: str) -> float:
        """Return how much a counter grew each second since the reading before."""
        if self.loads is None or self.before is None:
            return 0.0
        passed_s = self.loads.uptime_s - self.before.uptime_s
        # Negative: the server was restarted.
        if passed_s <= 0.0:
            return 0.0
        gained: int = getattr(self.loads, field) - getattr(self.before, field)
        return max(0, gained) / passed_s


class LoadsClient(ServerConnection):
    """Reads one server's load over a persistent connection."""

    def __init__(self, url: str, *, key: str | None = None, ca_file: Path | None = None) -> None:
        """Raises StartupError for an invalid URL, key or CA file."""
        super().__init__(url, key=key, ca_file=ca_file, kind="a PagedRay server")
        self._may_read_history = True
        self._reading = Reading()

    def read(self) -> Reading:
        """Return the current load. Raises EngineError if that fails."""
        loads = self.get("/loads", ServerLoads)
        last = self._reading
        name = last.name if last.name.model else self._read_name()
        self._reading = Reading(
            loads=loads, before=last.loads, history=self._read_history(), name=name
        )
        return self._reading

    def poll(
        self, readings: queue.SimpleQueue[Reading], *, every_s: float, is_closed: threading.Event
    ) -> None:
        """Read the load every `every_s` seconds until `is_closed`, then close the connection."""
        while not is_closed.is_set():
            try:
                readings.put(self.read())
            except EngineError as error:
                readings.put(replace(self._reading, error=str(error)))
            is_closed.wait(every_s)
        self.close()

    def _read_history(self) -> LoadHistory | None:
        if not self._may_read_history:
            return None
        try:
            return self.get("/loads/history", LoadHistory)
        except ForbiddenError:
            self._may_read_history = False
            return None

    def _read_name(self) -> ServerName:
        try:
            return self.get("/server_info", ServerName)
        except EngineError:
            return _UNNAMED


def top(url: str, *, key: str | None, ca_file: Path | None, every_s: float, is_once: bool) -> int:
    """Show the load of a server every `every_s` seconds, or once. Raises PagedRayError."""
    console = Console()
    client = LoadsClient(url, key=key, ca_file=ca_file)
    if is_once:
        with closing(client):
            console.print(TopView(url, client.read()), height=_PRINTED_LINES)
        return 0
    if not (sys.stdin.isatty() and console.is_terminal) or console.is_dumb_terminal:
        raise StartupError("pagedray top needs a terminal; use --once to print the load once.")
    readings: queue.SimpleQueue[Reading] = queue.SimpleQueue()
    is_closed = threading.Event()
    # A daemon: a server that does not respond must not delay the exit.
    threading.Thread(
        target=client.poll,
        args=(readings,),
        kwargs={"every_s": every_s, "is_closed": is_closed},
        name="pagedray-loads",
        daemon=True,
    ).start()
    with _single_keys() as keys:
        _show(console, readings, url, keys)
    is_closed.set()
    return 0


def _show(console: Console, readings: queue.SimpleQueue[Reading], url: str, keys: int) -> None:
    size = os.get_terminal_size(keys)
    # `Live` draws on the alternate screen and restores the old screen.
    with Live(TopView(url, Reading()), console=console, screen=True, auto_refresh=False) as live:
        while not _wait_for_end(keys):
            if not readings.empty():
                live.update(TopView(url, readings.get()), refresh=True)
            # The terminal may be resized between readings.
            elif (new_size := os.get_terminal_size(keys)) != size:
                size = new_size
                live.refresh()


def _wait_for_end(keys: int) -> bool:
    """Wait `_LOOK_S`; return whether the user pressed a key that ends the view."""
    readable, _, _ = select.select([keys], [], [], _LOOK_S)
    if not readable:
        return False
    pressed = os.read(keys, 64)
    return not pressed or any(key in _END_KEYS for key in pressed)


@contextmanager
def _single_keys() -> Iterator[int]:
    """Put the terminal into cbreak mode, without echo, and restore it on exit."""
    terminal = sys.stdin.fileno()
    saved = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield terminal
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, saved)


class TopView:
    """One frame of the display, in the size of the terminal."""

    def __init__(self, url: str, reading: Reading) -> None:
        name = reading.name
        words = ("PagedRay", name.version, name.model, url)
        self._title = " ".join(word for word in words if word)
        self._reading = reading

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        panel = Panel(
            Group(*self._parts()),
            title=Text(printable(f" {self._title} "), "bold"),
            subtitle=Text(" q quits ", "dim"),
            title_align="left",
            subtitle_align="right",
            box=box.ROUNDED,
            border_style="cyan",
            height=options.height or console.height,
        )
        for segment in console.render(panel, options):
            # Rich writes an ellipsis for text that it cuts.
            is_ascii = not options.encoding.startswith("utf")
            text = segment.text.encode("ascii", "replace").decode() if is_ascii else segment.text
            yield segment._replace(text=text)

    def _parts(self) -> Iterator[RenderableType]:
        reading, loads, history = self._reading, self._reading.loads, self._reading.history
        if reading.error:
            yield Text(printable(reading.error), "bold red")
        if loads is None:
            if not reading.error:
                yield Text("Connecting ...", "dim")
            return
        yield _state(loads, reading.rate("num_steps"))
        yield _pools(loads)
        yield Text()
        yield _plots(reading, loads)
        if history is None:
            if not reading.error:
                yield Text(_NO_HISTORY, "dim")
        elif loads.num_generated_tokens or loads.calls:
            yield _latencies(history)
        yield Text()
        yield _calls(loads.calls)


def _state(loads: ServerLoads, steps_per_s: float) -> Text:
    fields = (
        ("up", _seconds_text(loads.uptime_s)),
        ("running", str(loads.num_running)),
        ("waiting", str(loads.num_waiting)),
        ("swapped", str(loads.num_swapped)),
        ("preemptions", str(loads.num_preemptions)),
        ("queued", f"{loads.num_queued_requests} ({loads.num_queued_tokens} tokens)"),
        ("steps/s", _number_text(steps_per_s)),
        ("last step", _seconds_text(loads.last_step_s)),
        ("prefix hits", _part_text(loads.num_hit_tokens, loads.num_queried_tokens)),
        *_draft_fields(loads),
    )
    line = Text("ready" if loads.is_ready else "not ready", "bold green")
    for name, value in fields:
        line.append(f"  {name} ", "not bold dim default").append(value, "bold default")
    return line


def _draft_fields(loads: ServerLoads) -> Iterator[tuple[str, str]]:
    """Yield how many drafts were accepted, and the tokens of a sequence with drafts in a step."""
    if loads.num_chains:
        num_accepted = loads.num_accepted_draft_tokens
        length = 1 + num_accepted / loads.num_chains
        share = _part_text(num_accepted, loads.num_draft_tokens)
        yield "drafts accepted", f"{share} ({length:.1f} tokens a step)"


def _pools(loads: ServerLoads) -> Table:
    table = _table("", "", "")
    table.show_header = False
    for name, size, num_free, num_cached in (
        ("blocks on device", loads.num_blocks, loads.num_free_blocks, loads.num_cached_blocks),
        ("blocks on CPU", loads.num_cpu_blocks, loads.num_free_cpu_blocks, 0),
    ):
        num_used = size - num_free
        num_full = round(_BAR_WIDTH * num_used / size) if size else 0
        cached = f", {num_cached} cached" if num_cached else ""
        text = f"{num_used} of {size}{cached} {_part_text(num_used, size)}"
        table.add_row(name, Text(f"[{'#' * num_full:.<{_BAR_WIDTH}}]"), text)
    return table


def _plots(reading: Reading, loads: ServerLoads) -> Table:
    """Return a row for each figure: its current value, a plot of its history, its maximum."""
    history = reading.history
    samples = () if history is None else history.samples
    num_used = loads.num_blocks - loads.num_free_blocks
    table = _table("", "now", "10 min ago ... now", "highest")
    table.expand = True
    table.columns[2].ratio = 1

    def add_row(
        name: str,
        now: float | None,
        value_of: Callable[[LoadSample], float | None],
        write: Callable[[float | None], str] = _number_text,
    ) -> None:
        values = [value_of(sample) for sample in samples]
        # The current value covers less time than a sample, and may be higher.
        highest = max((value for value in (*values, now) if value is not None), default=None)
        interval_s = 1.0 if history is None else max(1.0, history.interval_s)
        plot = _Plot(values, round(_SPAN_S / interval_s), highest or 0.0)
        table.add_row(name, write(now), plot, write(highest))

    def block_text(number: float | None) -> str:
        return _part_text(round(number or 0.0), loads.num_blocks)

    prompts, generated = reading.rate("num_prompt_tokens"), reading.rate("num_generated_tokens")
    last = samples[-1].first_token_p95_s if samples else None
    add_row("generated tokens/s", generated, lambda sample: sample.generated_tokens_per_s)
    add_row("prompt tokens/s", prompts, lambda sample: sample.prompt_tokens_per_s)
    add_row("first token, p95", last, lambda sample: sample.first_token_p95_s, _seconds_text)
    add_row("running", loads.num_running, lambda sample: sample.num_running, _count_text)
    add_row("waiting", loads.num_waiting, lambda sample: sample.num_waiting, _count_text)
    add_row("blocks in use", num_used, lambda sample: sample.num_used_blocks, block_text)
    return table


class _Plot:
    """A plot as wide as its column."""

    def __init__(self, values: Sequence[float | None], num_places: int, maximum: float) -> None:
        self._values = values
        self._num_places = num_places
        self._maximum = maximum

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(
            draw_plot(
                self._values,
                num_places=self._num_places,
                width=options.max_width,
                maximum=self._maximum,
                chars="▁▂▃▄▅▆▇█" if options.encoding.startswith("utf") else "_.:-=+*#",
            ),
            "cyan",
        )


def draw_plot(
    values: Sequence[float | None], *, num_places: int, width: int, maximum: float, chars: str
) -> str:
    """Return `width` characters: the highest value of each column.

    `values` are the latest of `num_places` equally long intervals; the latest is at the right. A
    column without a value is blank. The scale begins at 0.
    """
    columns: list[float | None] = [None] * min(width, num_places)
    shown = values[-num_places:]
    for place, value in enumerate(shown, num_places - len(shown)):
        column = place * len(columns) // num_places
        if value is not None:
            columns[column] = max(value, columns[column] or 0.0)
    return "".join(
        " " if value is None else chars[round(value / (maximum or 1.0) * (len(chars) - 1))]
        for value in columns
    )


def _latencies(history: LoadHistory) -> Table:
    table = _table("last minute", "p50", "p90", "p99", "count")
    for name, latency in (
        ("first token", history.first_token),
        ("between tokens", history.between_tokens),
    ):
        seconds = (latency.p50_s, latency.p90_s, latency.p99_s)
        table.add_row(name, *map(_seconds_text, seconds), f"{latency.num_durations:,}")
    return table


def _calls(calls: Sequence[CallInfo]) -> RenderableType:
    if not calls:
        return Text("No open calls.", "dim")
    table = _table(f"call, of {len(calls)}", "age", "prompt tokens", "generated tokens")
    table.expand = True
    table.columns[0].ratio = 1
    for call in calls:
        counts = (str(call.num_prompt_tokens), str(call.num_generated_tokens))
        table.add_row(Text(printable(call.id)), _seconds_text(call.age_s), *counts)
    return table


def _table(name: str, *titles: str) -> Table:
    """Return a table of named rows with figures at the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(name, style="dim", no_wrap=True)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True, overflow="crop")
    return table


def _number_text(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _count_text(number: float | None) -> str:
    return f"{number or 0:,.0f}"


def _part_text(part: int, whole: int) -> str:
    """Return a percentage, or a dash if there is nothing of which it is a part."""
    return f"{100 * part / whole:.1f}%" if whole else "-"


def _seconds_text(seconds: float | None) -> str:
    """Return a duration in the unit that fits it, or a dash if there was none."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if not hours:
        return f"{minutes} min {int(seconds) % 60} s"
    return f"{hours} h {minutes % 60} min"
