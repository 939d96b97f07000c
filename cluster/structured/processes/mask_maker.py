"""The replica's end of the process that makes masks.

What that process knows can be told again, so that its death costs the sequence that caused it and
what follows the same grammar, and no other.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

import msgspec
from msgspec.structs import replace

from cluster.structured.processes.follower import tokens_s
from cluster.structured.processes.frames import read_frame, write_frame
from cluster.structured.processes.mask_messages import (
    Ask,
    AskMasks,
    Follow,
    Load,
    Loaded,
    LoadFailed,
    Masks,
)
from cluster.structured.processes.mask_step import OLD_MASK_S
from pagedray.errors import EngineError, OverloadedError
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pagedray.request import Request

__all__ = ["CompiledGrammar", "MaskMaker"]

logger = logging.getLogger(__name__)

_SPARE_S = 5.0
"""How long an answer may take beyond what the process may."""
_LOAD_S = 60.0
_MOST_LIVES = 3
"""Processes that may end, one after another, before a question is given up."""

Outcome = bytes | FinishReason
Item = TypeVar("Item")


class _DeathError(Exception):
    """The process ended over a question, or there is none that could be asked."""


class _Process(NamedTuple):
    """One life of the process."""

    life: int
    """Counts them; who was known to one is unknown to the next."""
    masks: socket.socket
    grammars: socket.socket


class _Connections(Protocol):
    """Sockets to a process, the one for masks and the one for grammars."""

    def __call__(self) -> tuple[socket.socket, socket.socket]:
        """Start a process. Raises EngineError."""


class MaskMaker:
    """Asks for masks. One thread asks for masks at a time, any thread for a grammar."""

    def __init__(
        self,
        connect: _Connections,
        *,
        num_mask_bytes: int,
        most_tenant_bytes: int,
        step_s: float = 5.0,
        alone_s: float = 2.0,
    ) -> None:
        """A process that does not answer ends after `step_s`, beyond what each mask allows.

        When a sequence is asked for alone, since it may be the one to blame, after `alone_s`.
        The grammars of a tenant take no more than `most_tenant_bytes`.
        """
        self.num_mask_bytes = num_mask_bytes
        """Bytes of a mask."""
        self._connect = connect
        self._most_tenant_bytes = most_tenant_bytes
        self._step_s = step_s
        self._alone_s = alone_s
        self._ids = count()
        self._ended_sequence_ids: deque[int] = deque()
        self._ended_grammar_ids: deque[int] = deque()
        self._lock = threading.Lock()
        """For questions; taken before that for grammars."""
        self._grammar_lock = threading.Lock()
        self._grammars: WeakValueDictionary[int, CompiledGrammar] = WeakValueDictionary()
        """Those in use and those that are kept; changed with the lock for grammars."""
        # Changed with the lock for grammars, and read without it: no step waits for a grammar.
        self._process: _Process | None = None
        self._left: deque[socket.socket] = deque()
        """For masks, to processes that have ended; to be closed with the lock for questions."""
        self._num_lives = 0

    def grammar(self, text: bytes, *, tenant: str = "") -> tuple[CompiledGrammar, int]:
        """Return a compiled grammar of a tenant and its size in bytes.

        Raises EngineError, or OverloadedError if there is no memory for it.
        """
        grammar = CompiledGrammar(
            self, next(self._ids), text, tenant, self._ended_grammar_ids.append
        )
        try:
            num_bytes = self._load(grammar)
        except _DeathError:
            # It may have died of another.
            try:
                num_bytes = self._load(grammar)
            except _DeathError as error:
                raise EngineError(f"A compiled grammar was not taken. {error}") from error
        self._count(grammar, num_bytes)
        return grammar, num_bytes

    def matcher(self, grammar: CompiledGrammar, request: Request) -> _Matcher:
        """Return a matcher for a continuation of the request, which is yet to begin."""
        return _Matcher(grammar, next(self._ids), request, self._ended_sequence_ids.append)

    def masks(self, asked: Sequence[_Asked]) -> list[Outcome]:
        """Return which tokens may follow, or how a sequence ends, for each matcher and its tokens.

        It never raises.
        """
        if not asked:
            return []
        outcomes: dict[int, Outcome] = {}
        with self._lock:
            self._close_left()
            try:
                self._ask(dict(enumerate(asked)), outcomes, self._step_s)
            except _DeathError as error:
                logger.warning("Each sequence is asked for alone. %s", error)
                # One of them may be the cause, and then it is the only one to end, with what
                # follows the same grammar: each of those would cost a process too.
                fatal: set[CompiledGrammar] = set()
                for row, one in enumerate(asked):
                    if row not in outcomes:
                        outcomes[row] = self._asked_alone(one, fatal)
        return [outcomes[row] for row in range(len(asked))]

    def close(self) -> None:
        """End the process, and who waits for it."""
        process = self._process
        waited_for = () if process is None else (process.masks, process.grammars)
        for connection in (*self._left.copy(), *waited_for):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with self._lock, self._grammar_lock:
            self._disconnect()
            self._close_left()

    def _asked_alone(self, asked: _Asked, fatal: set[CompiledGrammar]) -> Outcome:
        """Return the outcome for one; add its grammar to the fatal ones if that ends a process."""
        grammar = asked[0].grammar
        if grammar in fatal:
            return FinishReason.ERROR
        outcomes: dict[int, Outcome] = {}
        try:
            fatal |= self._ask({0: asked}, outcomes, self._alone_s)
        except _DeathError as error:
            logger.warning("What follows a grammar is ended. %s", error)
            fatal.add(grammar)
            return FinishReason.ERROR
        return outcomes[0]

    def _ask(
        self, asked: dict[int, _Asked], outcomes: dict[int, Outcome], limit_s: float
    ) -> set[CompiledGrammar]:
        """Ask until there is an outcome for each row; return the grammars that ended a process.

        Raises _DeathError.
        """
        fatal: set[CompiledGrammar] = set()
        while asked:
            rows = list(asked)
            answer = self._answer(list(asked.values()), limit_s)
            size = self.num_mask_bytes
            for place, row in enumerate(rows):
                outcomes[row] = (
                    answer.ends.get(place) or answer.words[place * size : (place + 1) * size]
                )
            # What follows the same grammar may be as slow, and there may be many.
            fatal |= {asked[rows[place]][0].grammar for place in answer.culprits}
            left = [rows[place] for place in answer.unmade]
            outcomes |= {row: FinishReason.ERROR for row in left if asked[row][0].grammar in fatal}
            asked = {row: asked[row] for row in left if asked[row][0].grammar not in fatal}
            for row in asked:
                del outcomes[row]
        return fatal

    def _answer(self, asked: Sequence[_Asked], limit_s: float) -> Masks:
        process = self._loaded({matcher.grammar for matcher, _ in asked})
        asks = [matcher.ask(token_ids, process.life) for matcher, token_ids in asked]
        limit_s += sum(OLD_MASK_S + tokens_s(ask) for ask in asks)
        question = AskMasks(
            asks,
            _drained(self._ended_sequence_ids),
            _drained(self._ended_grammar_ids),
            limit_s,
        )
        try:
            process.masks.settimeout(limit_s + _SPARE_S)
            write_frame(process.masks, msgspec.msgpack.encode(question))
            answer = msgspec.msgpack.decode(read_frame(process.masks), type=Masks)
        except (OSError, EOFError) as error:
            self._forget(process)
            raise _death(error) from error
        for (matcher, _), spent_s in zip(asked, answer.spent_s, strict=True):
            matcher.note_spent(spent_s)
        for complaint in answer.complaints:
            logger.warning("A sequence is ended: %s.", complaint)
        if answer.culprits:
            self._forget(process)
        return answer

    def _forget(self, process: _Process) -> None:
        with self._grammar_lock:
            # Who compiles may have started another by now.
            if self._process is process:
                self._disconnect()

    def _loaded(self, grammars: Iterable[CompiledGrammar]) -> _Process:
        """Return a process that has all of these grammars."""
        for _ in range(_MOST_LIVES):
            process = self._process
            missing = [one for one in grammars if process is None or one.life != process.life]
            if process is not None and not missing:
                return process
            try:
                for grammar in missing:
                    self._load(grammar)
            except (EngineError, OverloadedError, OSError) as error:
                # There is no process, or it does not take what it took once.
                raise _DeathError(str(error)) from error
        raise _DeathError(f"{_MOST_LIVES} processes that make masks have ended.")

    def _load(self, grammar: CompiledGrammar) -> int:
        with self._grammar_lock:
            process = self._process
            if process is None:
                self._num_lives += 1
                process = self._process = _Process(self._num_lives, *self._connect())
            try:
                process.grammars.settimeout(_LOAD_S)
                load = Load(grammar.id, grammar.text, _drained(self._ended_grammar_ids))
                write_frame(process.grammars, msgspec.msgpack.encode(load))
                body = read_frame(process.grammars)
                answer = msgspec.msgpack.decode(body, type=Loaded | LoadFailed)
            except (OSError, EOFError) as error:
                # A thread may be waiting for masks, which are there even if the process is not.
                self._left.append(process.masks)
                process.grammars.close()
                self._process = None
                raise _death(error) from error
            if isinstance(answer, LoadFailed):
                raise _refusal_of(answer)
            grammar.life = process.life
            return answer.num_bytes

    def _disconnect(self) -> None:
        if self._process is not None:
            self._process.masks.close()
            self._process.grammars.close()
            self._process = None

    def _close_left(self) -> None:
        for connection in _drained(self._left):
            connection.close()

    def _count(self, grammar: CompiledGrammar, num_bytes: int) -> None:
        """Count what a tenant's grammars take. Raises OverloadedError if that is too much."""
        with self._grammar_lock:
            same = [one for one in self._grammars.values() if one.tenant == grammar.tenant]
            taken = num_bytes + sum(one.num_bytes for one in same)
            if taken > self._most_tenant_bytes:
                raise OverloadedError(
                    f"The tenant's structures in use take {taken >> 20} MiB of memory with this "
                    f"one; at most {self._most_tenant_bytes >> 20} MiB are allowed."
                )
            grammar.num_bytes = num_bytes
            self._grammars[grammar.id] = grammar


def _death(error: Exception) -> _DeathError:
    return _DeathError(f"The process that makes masks has ended: {error!r}.")


def _refusal_of(failure: LoadFailed) -> EngineError | OverloadedError:
    if failure.is_out_of_memory:
        return OverloadedError("The structures in use take all the memory that there is for them.")
    return EngineError(f"A compiled grammar was not taken: {failure.message}.")


class CompiledGrammar:
    """A structure, ready for any number of sequences."""

    def __init__(
        self,
        maker: MaskMaker,
        grammar_id: int,
        text: bytes,
        tenant: str,
        note_end: Callable[[int], None],
    ) -> None:
        self.id = grammar_id
        self.text = text
        self.tenant = tenant
        self.num_bytes = 0
        """What it takes in the process that makes masks, once that has it."""
        self.life = 0
        """The process that it was last loaded into."""
        self._maker = maker
        self._note_end = note_end

    def __del__(self) -> None:
        self._note_end(self.id)

    @property
    def num_mask_bytes(self) -> int:
        """Bytes of a mask."""
        return self._maker.num_mask_bytes

    def matcher(self, request: Request) -> _Matcher:
        """Return a matcher for a continuation of the request, which is yet to begin."""
        return self._maker.matcher(self, request)

    def masks(self, asked: Sequence[_Asked]) -> list[Outcome]:
        """Return the masks of matchers of this and other grammars; see `MaskMaker.masks`."""
        return self._maker.masks(asked)


class _Matcher:
    """Stands for one sequence that the process follows."""

    def __init__(
        self,
        grammar: CompiledGrammar,
        sequence_id: int,
        request: Request,
        note_end: Callable[[int], None],
    ) -> None:
        sampling = request.sampling
        self.grammar = grammar
        self._id = sequence_id
        self._note_end = note_end
        self._follow = Follow(
            grammar.id,
            sampling.min_tokens,
            sampling.ignore_eos,
            request.eos_token_ids,
            tuple(sampling.stop_token_ids),
            tenant=grammar.tenant,
        )
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._num_told = self._num_prompt_tokens
        self._life = 0
        self._spent_s = 0.0

    def __del__(self) -> None:
        self._note_end(self._id)

    def note_spent(self, spent_s: float) -> None:
        """Remember the CPU time that the sequence took so far, or 0 if nobody knows."""
        self._spent_s = max(self._spent_s, spent_s)

    def ask(self, token_ids: Sequence[int], life: int) -> Ask:
        """Return the question for the next mask, for a process that counts as `life`."""
        follow = None
        if life != self._life:
            self._life, self._num_told = life, self._num_prompt_tokens
            follow = replace(self._follow, spent_s=self._spent_s)
        news = list(token_ids[self._num_told :])
        self._num_told = len(token_ids)
        return Ask(self._id, news, follow)


_Asked = tuple[_Matcher, "Sequence[int]"]


def _drained(items: deque[Item]) -> list[Item]:
    drained = []
    # Two threads may do so at once.
    with contextlib.suppress(IndexError):
        while True:
            drained.append(items.popleft())
    return drained
