"""The replica's end of the process that makes masks.

What that process knows can be told again, so that its death costs the sequence
that caused it and no other.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from cluster.structured.follower import TOKEN_S
from cluster.structured.frames import read_frame, write_frame
from cluster.structured.mask_messages import Ask, AskMasks, Follow, Load, Loaded, LoadFailed, Masks
from cluster.structured.mask_step import OLD_MASK_S
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


class _DeathError(Exception):
    """The process ended over a question."""


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
        step_s: float = 5.0,
        alone_s: float = 2.0,
    ) -> None:
        """A process that does not answer ends after `step_s`, beyond what each mask allows.

        When a sequence is asked for alone, since it may be the one to blame, after `alone_s`.
        """
        self.num_mask_bytes = num_mask_bytes
        """Bytes of a mask."""
        self._connect = connect
        self._step_s = step_s
        self._alone_s = alone_s
        self._ids = count()
        self._ended_sequence_ids: deque[int] = deque()
        self._ended_grammar_ids: deque[int] = deque()
        self._lock = threading.Lock()
        """For questions; taken before that for grammars."""
        self._grammar_lock = threading.Lock()
        # Changed with the lock for grammars, and read without it: no step waits for a grammar.
        self._process: _Process | None = None
        self._num_lives = 0

    def grammar(self, text: bytes) -> tuple[CompiledGrammar, int]:
        """Return a compiled grammar and its size in bytes.

        Raises EngineError, or OverloadedError if there is no memory for it.
        """
        grammar = CompiledGrammar(self, next(self._ids), text, self._ended_grammar_ids.append)
        try:
            return grammar, self._load(grammar)
        except _DeathError:
            # It may have died of another.
            pass
        try:
            return grammar, self._load(grammar)
        except _DeathError as error:
            raise EngineError(f"A compiled grammar was not taken: {error}.") from error

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
            try:
                self._ask(dict(enumerate(asked)), outcomes, self._step_s)
            except _DeathError:
                logger.warning("The process that makes masks has ended; another is started.")
                # One of them may be the cause, and then it is the only one to end.
                for row, one in enumerate(asked):
                    if row not in outcomes:
                        outcomes[row] = self._asked_alone(one)
        return [outcomes[row] for row in range(len(asked))]

    def close(self) -> None:
        """End the process, and who waits for it."""
        process = self._process
        for connection in () if process is None else (process.masks, process.grammars):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with self._lock, self._grammar_lock:
            self._disconnect()

    def _asked_alone(self, asked: _Asked) -> Outcome:
        outcomes: dict[int, Outcome] = {}
        try:
            self._ask({0: asked}, outcomes, self._alone_s)
        except _DeathError as error:
            logger.warning("A sequence is ended with the process of its grammar: %s", error)
            return FinishReason.ERROR
        return outcomes[0]

    def _ask(self, asked: dict[int, _Asked], outcomes: dict[int, Outcome], limit_s: float) -> None:
        """Ask until there is an outcome for each row. Raises _DeathError."""
        while asked:
            rows = list(asked)
            answer = self._answer(list(asked.values()), limit_s)
            size = self.num_mask_bytes
            for place, row in enumerate(rows):
                outcomes[row] = (
                    answer.ends.get(place) or answer.words[place * size : (place + 1) * size]
                )
            # What follows the same grammar may be as slow, and there may be many.
            slow = {asked[rows[place]][0].grammar for place in answer.culprits}
            left = [rows[place] for place in answer.unmade]
            outcomes |= {row: FinishReason.ERROR for row in left if asked[row][0].grammar in slow}
            asked = {row: asked[row] for row in left if asked[row][0].grammar not in slow}
            for row in asked:
                del outcomes[row]

    def _answer(self, asked: Sequence[_Asked], limit_s: float) -> Masks:
        process = self._loaded({matcher.grammar for matcher, _ in asked})
        asks = [matcher.ask(token_ids, process.life) for matcher, token_ids in asked]
        limit_s += sum(OLD_MASK_S + TOKEN_S * len(ask.token_ids) for ask in asks)
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
            raise _DeathError(error) from error
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
                raise _DeathError(error) from error
        raise _DeathError("One after another has ended.")

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
                self._disconnect()
                raise _DeathError(error) from error
            if isinstance(answer, LoadFailed):
                raise _refusal_of(answer)
            grammar.life = process.life
            return answer.num_bytes

    def _disconnect(self) -> None:
        if self._process is not None:
            self._process.masks.close()
            self._process.grammars.close()
            self._process = None


def _refusal_of(failure: LoadFailed) -> EngineError | OverloadedError:
    if failure.is_out_of_memory:
        return OverloadedError("The structures in use take all the memory that there is for them.")
    return EngineError(f"A compiled grammar was not taken: {failure.message}.")


class CompiledGrammar:
    """A structure, ready for any number of sequences."""

    def __init__(
        self, maker: MaskMaker, grammar_id: int, text: bytes, note_end: Callable[[int], None]
    ) -> None:
        self.id = grammar_id
        self.text = text
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
        )
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._num_told = self._num_prompt_tokens
        self._life = 0

    def __del__(self) -> None:
        self._note_end(self._id)

    def ask(self, token_ids: Sequence[int], life: int) -> Ask:
        """Return the question for the next mask, for a process that counts as `life`."""
        follow = None
        if life != self._life:
            self._life, self._num_told = life, self._num_prompt_tokens
            follow = self._follow
        news = list(token_ids[self._num_told :])
        self._num_told = len(token_ids)
        return Ask(self._id, news, follow)


_Asked = tuple[_Matcher, "Sequence[int]"]


def _drained(ids: deque[int]) -> list[int]:
    drained = []
    # Two threads may do so at once.
    with contextlib.suppress(IndexError):
        while True:
            drained.append(ids.popleft())
    return drained
