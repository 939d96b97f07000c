"""The speed of a download in its progress line."""

from __future__ import annotations

from workers.hub.locate import DownloadLine


def test_speed_is_that_of_the_last_seconds() -> None:
    times = iter([0.0, 0.1, 1.0, 2.0, 20.0, 22.0])
    line = DownloadLine("org/tiny", lambda: next(times))
    assert line.text(0) == "Downloading org/tiny"
    assert line.text(1_000_000) == "Downloading org/tiny"
    assert line.text(5_000_000) == "Downloading org/tiny; 5.0 MB/s"
    assert line.text(20_000_000) == "Downloading org/tiny; 10.0 MB/s"
    assert line.text(30_000_000) == "Downloading org/tiny"
    assert line.text(31_000_000) == "Downloading org/tiny; 0.5 MB/s"
