"""Overlapped plans, which were made before the tokens of the step before were known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from workers.runner.input_batch import draft_ids_of
from workers.sampling.edits import Chains

if TYPE_CHECKING:
    from pagedray.batch import StepPlan
    from workers.sampler import Sampled

__all__ = ["completed_plan"]


def completed_plan(plan: StepPlan, before: StepPlan, sampled: Sampled) -> StepPlan:
    """Return an overlapped plan with the positions and drafts that it lacks.

    `before` is the plan of the step before, not overlapped, and `sampled` are its tokens and the
    guesses behind them, on the host.
    """
    assert not before.is_overlapped
    rows = np.frombuffer(plan.decodes.rows, np.int32)
    is_draft = np.append(False, rows[1:] == rows[:-1])
    firsts = np.flatnonzero(~is_draft)
    places = np.arange(len(rows)) - np.repeat(firsts, np.diff(firsts, append=len(rows)))
    rows_before = np.frombuffer(before.decodes.rows, np.int32)
    chains = Chains(draft_ids_of(before.decodes, len(rows_before)))
    num_refused, indices = np.zeros((2, 1 + int(rows_before.max())), dtype=np.int32)
    of_chains = rows_before[chains.firsts]
    num_refused[of_chains] = chains.lengths - chains.num_tokens(sampled.token_ids)
    indices[of_chains] = np.arange(len(of_chains))
    draft_ids = np.frombuffer(plan.decodes.draft_ids, np.int32)
    if is_draft.any() and not len(draft_ids):
        assert sampled.draft_ids is not None
        guesses = sampled.draft_ids.numpy()[indices[rows[is_draft]], places[is_draft] - 1]
        draft_ids = guesses.astype(np.int32)
    positions = np.frombuffer(plan.decodes.positions, np.int32) - num_refused[rows]
    decodes = msgspec.structs.replace(
        plan.decodes, positions=positions.tobytes(), draft_ids=draft_ids.tobytes()
    )
    return msgspec.structs.replace(plan, decodes=decodes, is_overlapped=False)
