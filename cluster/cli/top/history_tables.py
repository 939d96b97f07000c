"""The last ten minutes of a server as plots, and the latencies of its last minute."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table

from cluster.cli.top.cells import number_text, part_text, seconds_text
from cluster.cli.top.plot import draw_plot

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.serving.server_info import ServerLoads
    from cluster.serving.telemetry.load_history import LoadHistory, LoadSample

__all__ = ["NUM_PLOTS", "latency_table", "plot_table"]

NUM_PLOTS = 6
"""Rows of the table of plots."""

_SPAN_S = 600.0
# Of the names, the figures and the spaces between the columns.
_NUM_OTHER_COLUMNS = 43


class _Row(NamedTuple):
    """A row of the table of plots."""

    name: str
    current: float | None
    value_of: Callable[[LoadSample], float | None]
    write: Callable[[float], str]
    top: float = 0.0
    """The least value at the top of its plot."""

    def text(self, value: float | None) -> str:
        return "-" if value is None else self.write(value)


def plot_table(
    loads: ServerLoads,
    rates: tuple[float, float, float],
    history: LoadHistory,
    *,
    width: int,
    row_height: int,
    is_ascii: bool,
) -> Table:
    """Return a plot in each row, between its current and its highest value.

    A row of more than one line ends with a blank line.
    """
    plot_width = max(10, width - _NUM_OTHER_COLUMNS)
    num_places = max(1, round(_SPAN_S / max(1.0, history.interval_s)))
    begin = "10 min ago" if plot_width > 20 else "10 min"
    title = begin.ljust(min(plot_width, num_places) - 3) + "now"
    table = _grid("", "now", title, "highest")
    table.columns[2].style = "cyan"
    for row in _rows(loads, rates, history):
        values = [row.value_of(sample) for sample in history.samples]
        # The current value covers less time than a sample, and may be higher.
        known = [value for value in (*values, row.current) if value is not None]
        highest = max(known, default=None)
        plot = draw_plot(
            values,
            num_places=num_places,
            width=plot_width,
            height=max(1, row_height - 1),
            top=max(row.top, highest or 0.0),
            is_ascii=is_ascii,
        )
        plot += "\n" if row_height > 1 else ""
        table.add_row(row.name, row.text(row.current), plot, row.text(highest))
    return table


def _rows(
    loads: ServerLoads, rates: tuple[float, float, float], history: LoadHistory
) -> tuple[_Row, ...]:
    """Return the rows of the table of plots, `NUM_PLOTS` of them."""
    generated, prompt, _ = rates
    last = history.samples[-1].first_token_p95_s if history.samples else None

    def write_blocks(num_blocks: float) -> str:
        return part_text(round(num_blocks), history.num_blocks)

    return (
        _Row(
            "generated tokens/s",
            generated,
            lambda sample: sample.generated_tokens_per_s,
            number_text,
        ),
        _Row(
            "prompt tokens/s",
            prompt,
            lambda sample: sample.prompt_tokens_per_s,
            number_text,
        ),
        _Row(
            "first token, p95",
            last,
            lambda sample: sample.first_token_p95_s,
            seconds_text,
        ),
        _Row("running", loads.num_running, lambda sample: sample.num_running, _count_text),
        _Row("waiting", loads.num_waiting, lambda sample: sample.num_waiting, _count_text),
        _Row(
            "blocks in use",
            loads.num_blocks - loads.num_free_blocks,
            lambda sample: sample.num_used_blocks,
            write_blocks,
            float(history.num_blocks),
        ),
    )


def latency_table(history: LoadHistory) -> Table:
    """Return percentiles of the latencies of the last minute."""
    table = _grid("last minute", "p50", "p90", "p99", "count")
    for name, latency in (
        ("first token", history.first_token),
        ("between tokens", history.between_tokens),
    ):
        seconds = (latency.p50_s, latency.p90_s, latency.p99_s)
        table.add_row(name, *map(seconds_text, seconds), f"{latency.num_durations:,}")
    return table


def _grid(name: str, *titles: str) -> Table:
    """Return a table of named rows with figures at the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(name, style="dim", no_wrap=True)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True, overflow="crop")
    return table


def _count_text(number: float) -> str:
    return f"{number:,.0f}"
