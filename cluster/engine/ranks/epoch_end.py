"""The end of an epoch after the death of a rank: which ranks stay for the next one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.engine.ranks.rank_places import Actor
    from cluster.engine.ranks.ray_reports import RayReports

__all__ = ["end_actors"]

logger = logging.getLogger(__name__)

_LEAVE_TIMEOUT_S = 4.0
"""How long a rank may take to leave an epoch before it is ended."""
_ANSWER_TIMEOUT_S = 2.0
"""How long Ray may take beyond that to pass its answer on."""

# Any: the type of Ray's references depends on how Ray was built.
_Reference = Any


def end_actors(
    actors: Sequence[Actor], *, hung: Sequence[int], reports: RayReports
) -> dict[int, Actor]:
    """End the ranks of an epoch but for those that can join another; return these by rank.

    Ranks that are `hung` are killed at once. All are ended if no rank is found dead: then it is
    unknown what is wrong. Closes `reports`.
    """
    # A process that is stopped would not answer Ray, and would end only when it continues.
    reports.kill_processes(hung)
    for rank in hung:
        ray.kill(actors[rank])
    leaving: dict[int, _Reference] = {}
    if len(actors) > 1:
        leaving = {
            rank: actor.leave_epoch.remote(_LEAVE_TIMEOUT_S)
            for rank, actor in enumerate(actors)
            if rank not in hung
        }
    if leaving:
        ray.wait(
            list(leaving.values()),
            num_returns=len(leaving),
            timeout=_LEAVE_TIMEOUT_S + _ANSWER_TIMEOUT_S,
        )
    reports.kill_processes(
        [rank for rank, reference in leaving.items() if not _has_answered(reference)]
    )
    reports.close()
    survivors = {rank: actors[rank] for rank, reference in leaving.items() if _has_left(reference)}
    if len(survivors) == len(actors):
        survivors = {}
    for rank, actor in enumerate(actors):
        if rank not in survivors:
            ray.kill(actor)
    return survivors


def _has_answered(reference: _Reference) -> bool:
    finished, _ = ray.wait([reference], timeout=0)
    return bool(finished)


def _has_left(leaving: _Reference) -> bool:
    """Return whether a rank has left its epoch and can join another."""
    try:
        problem = ray.get([leaving], timeout=0)[0]
    except GetTimeoutError:
        problem = "it did not answer."
    except RayError:
        # It has died, and why is known from the end of its steps.
        return False
    if problem is not None:
        logger.warning("Also replacing a rank that was still alive: %s", problem)
    return problem is None
