"""Log lines that any client can cause come once a minute."""

from __future__ import annotations

from cluster.serving.telemetry.log_lines import LineLimit


def test_a_line_reports_what_came_since_the_last_one() -> None:
    now_s = 100.0
    limit = LineLimit(interval_s=60.0, clock=lambda: now_s)
    assert [limit.count_event() for _ in range(3)] == [1, 0, 0]
    now_s += 59.0
    assert limit.count_event() == 0
    now_s += 1.0
    assert [limit.count_event() for _ in range(2)] == [4, 0]
