"""Numbers of things in messages."""

from __future__ import annotations

from pagedray.wording.counted import counted


def test_only_one_thing_is_singular() -> None:
    assert [counted(number, "open call") for number in (0, 1, 2)] == [
        "0 open calls",
        "1 open call",
        "2 open calls",
    ]
