"""Which requests the scheduler accepts."""

from array import array

from cluster.scheduling.kv_manager import KvManager
from cluster.scheduling.queues.backlog import Backlog
from pagedray.errors import CapacityError, InvalidRequestError
from pagedray.request import Request
from pagedray.wording.counted import counted

__all__ = ["Admission"]

_MAX_TOKEN_ID = 2**31 - 1


class Admission:
    """Rejects requests that can never run, and those for which the queue has no room."""

    __slots__ = ("_backlog", "_kv", "_max_model_len")

    def __init__(self, kv: KvManager, backlog: Backlog, *, max_model_len: int) -> None:
        self._kv = kv
        self._backlog = backlog
        self._max_model_len = max_model_len

    def read_prompt(self, request: Request) -> "array[int]":
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
