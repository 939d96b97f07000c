"""How long a step waits for masks."""

from __future__ import annotations

import pytest

from cluster.engine.engine_loop import MaskPatience


def test_the_wait_follows_the_duration_of_steps_within_bounds() -> None:
    patience = MaskPatience()
    waits = []
    for step_s in (0.001, 0.012, 5.0):
        patience.note_step(step_s)
        waits.append(patience.wait_s(delays_others=True))
    assert waits == pytest.approx([0.003, 0.009, 0.02])


def test_steps_that_wait_for_masks_do_not_extend_the_wait() -> None:
    patience = MaskPatience()
    # Masks that always arrive just in time, beside a step of 1 ms.
    for _ in range(100):
        patience.note_step(patience.wait_s(delays_others=True) + 0.001)
    assert patience.wait_s(delays_others=True) <= 0.0031
    # Nor do steps whose masks are late.
    patience.note_masks(may_delay_step=True)
    patience.note_step(0.02)
    assert patience.wait_s(delays_others=True) <= 0.0031


def test_a_wait_that_delays_no_other_sequence_is_as_long_as_any() -> None:
    patience = MaskPatience()
    patience.note_step(0.001)
    assert patience.wait_s(delays_others=False) == 0.02
