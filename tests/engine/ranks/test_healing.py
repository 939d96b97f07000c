"""The log line of a replacement says which ranks stayed, and where the seconds went."""

from __future__ import annotations

import re
import time

from cluster.engine.ranks.healing import Healing


def test_line_has_every_phase_and_the_parts_of_each_rank() -> None:
    healing = Healing()
    time.sleep(0.02)
    healing.end_phase("left")
    time.sleep(0.02)
    healing.end_phase("first step")
    healing.note_ranks(
        kept=[0, 2],
        replaced={1: "spare"},
        parts=[{"group": 0.25}, {"weights": 1.5, "model": 0.001}, {}],
    )
    line = str(healing)
    found = re.fullmatch(
        r"Replaced rank 1 \(spare\), kept ranks 0, 2 in (\S+) s: left (\S+), first step (\S+); "
        r"rank 0: group 0\.25; rank 1: weights 1\.50\.",
        line,
    )
    assert found is not None, line
    total, left, first_step = map(float, found.groups())
    assert left >= 0.02
    assert abs(total - left - first_step) < 0.015


def test_line_of_a_group_without_survivors_names_none() -> None:
    healing = Healing()
    healing.end_phase("processes")
    healing.note_ranks(kept=[], replaced={1: "new process", 0: "spare"}, parts=[{}, {}])
    assert str(healing).startswith("Replaced ranks 0 (spare), 1 (new process) in 0.00 s: ")
