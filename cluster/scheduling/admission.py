"""Which requests the scheduler accepts."""

from __future__ import annotations

import heapq
from array import array
from typing import TYPE_CHECKING

from pagedray.errors import CapacityError, InvalidRequestError
from pagedray.wording.counted import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.scheduling.backlog import Backlog
    from cluster.scheduling.kv_manager import KvManager
    from cluster.scheduling.sequence import ActiveRequest
    from pagedray.request import Request

__all__ = ["Admission", "Deadlines"]

_MAX_TOKEN_ID = 2**31 - 1

_FEW = 64
"""Entries of ended requests that are kept without a search for them."""


class Admission:
    """Rejects requests that can never run, and those for which the queue has no room."""

    __slots__ = ("_backlog", "_kv", "_max_model_len")

    def __init__(self, kv: KvManager, backlog: Backlog, *, max_model_len: int) -> None:
        self._kv = kv
        self._backlog = backlog
        self._max_model_len = max_model_len

    def read_prompt(self, request: Request) -> array[int]:
        """Return the tokens of a prompt, uint32. Raises InvalidRequestError.

        May be called from any thread.
        """
        prompt = request.prompt_token_ids
        if not 0 < len(prompt) < self._max_model_len:
            raise InvalidRequestError(
                f"A prompt may have 1 to {self._max_model_len - 1} tokens, not {len(prompt)}.",
                param="prompt",
            )
        try:
            # Appending to an array of signed integers takes twice as long.
            token_ids = array("I", prompt)
        except OverflowError:
            token_ids = array("I", (_MAX_TOKEN_ID + 1,))
        if max(token_ids) > _MAX_TOKEN_ID:
            raise InvalidRequestError(
                f"Token ids must be from 0 to {_MAX_TOKEN_ID}.", param="prompt"
            )
        return token_ids

    def check_request(self, request: Request) -> None:
        """Raise CapacityError, InvalidRequestError or OverloadedError unless it is accepted."""
        prompt = request.prompt_token_ids
        num_tokens = min(len(prompt) + request.sampling.max_tokens, self._max_model_len)
        needed, capacity = self._kv.blocks_for(num_tokens), self._kv.pool.num_blocks
        if needed > capacity:
            raise CapacityError(needed, capacity)
        if request.generated_token_ids:
            # Another replica admitted it.
            self._check_generated(request)
        else:
            self._backlog.check_room(request.tenant, len(prompt))

    def _check_generated(self, request: Request) -> None:
        """Raise InvalidRequestError if a request cannot continue from its generated tokens."""
        generated = request.generated_token_ids
        if len(generated) != request.sampling.n or not request.open_indices:
            raise InvalidRequestError(
                f"A request with n = {request.sampling.n} cannot continue from the tokens of "
                f"{counted(len(generated), 'sequence')}, {len(request.open_indices)} unfinished."
            )
        num_prompt_tokens = len(request.prompt_token_ids)
        most = min(request.sampling.max_tokens, self._max_model_len - num_prompt_tokens) - 1
        for token_ids in generated:
            if token_ids and len(token_ids) > most:
                raise InvalidRequestError(
                    f"A sequence cannot continue after {len(token_ids)} generated tokens: it ends "
                    f"after {most + 1}."
                )
            if token_ids and (min(token_ids) < 0 or max(token_ids) > _MAX_TOKEN_ID):
                raise InvalidRequestError(f"Token ids must be from 0 to {_MAX_TOKEN_ID}.")


class Deadlines:
    """The deadlines of open requests, the earliest first."""

    def __init__(self, requests: Mapping[str, ActiveRequest]) -> None:
        """`requests` has the open requests by id; it is read whenever a deadline is."""
        self._requests = requests
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Return the number of kept deadlines, including those of ended requests."""
        return len(self._heap)

    def add_request(self, request: Request) -> None:
        """Note the deadline of an open request, if it has one."""
        if request.deadline_s is None:
            return
        heapq.heappush(self._heap, (request.deadline_s, request.id))
        if len(self._heap) > 2 * len(self._requests) + _FEW:
            self._heap = [entry for entry in self._heap if self._is_open(*entry)]
            heapq.heapify(self._heap)

    def take_due(self, now_s: float) -> list[str]:
        """Return the ids of the open requests whose deadline has passed, and forget them."""
        due: list[str] = []
        while self._heap and self._heap[0][0] <= now_s:
            deadline_s, request_id = heapq.heappop(self._heap)
            if self._is_open(deadline_s, request_id):
                due.append(request_id)
        return due

    def _is_open(self, deadline_s: float, request_id: str) -> bool:
        # An id may be used again, with another deadline.
        active = self._requests.get(request_id)
        return active is not None and active.request.deadline_s == deadline_s
