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
from typing import TYPE_CHECKING, Protocol

import msgspec

from cluster.structured.frames import read_frame, write_frame
from cluster.structured.mask_messages import Ask, AskMasks, Follow, Load, Loaded, LoadFailed, Masks
from cluster.structured.mask_process import MAX_STEP_S
from pagedray.errors import EngineError
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pagedray.request import Request

__all__ = ["CompiledGrammar", "MaskMaker"]

logger = logging.getLogger(__name__)

_SPARE_S = 10.0
"""How long an answer may take beyond what the process lets itself take."""
_LOAD_S = 60.0
_MOST_LIVES = 3
"""Processes that may end, one after another, before a question is given up."""

Outcome = bytes | FinishReason


class _DeathError(Exception):
    """The process ended over a question."""


class _Connections(Protocol):
    """Sockets to a process, the one for masks and the one for grammars."""

    def __call__(self) -> tuple[socket.socket, socket.socket]:
        """Start a process. Raises EngineError."""


class MaskMaker:
    """Asks for masks. One thread asks for masks at a time, any thread for a grammar."""

    def __init__(self, connect: _Connections, *, num_mask_bytes: int) -> None:
        self.num_mask_bytes = num_mask_bytes
        """Bytes of a mask."""
        self._connect = connect
        self._ids = count()
        self._ended_sequence_ids: deque[int] = deque()
        self._ended_grammar_ids: deque[int] = deque()
        self._lock = threading.Lock()
        """For questions; taken before that for grammars."""
        self._grammar_lock = threading.Lock()
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._life = 0
        """Counts processes; who was known to one is unknown to the next."""

    def grammar(self, text: bytes) -> tuple[CompiledGrammar, int]:
        """Return a compiled grammar and its size in bytes. Raises EngineError."""
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

    def masks(self, asked: Sequence[tuple[_Matcher, Sequence[int]]]) -> list[Outcome]:
        """Return which tokens may follow, or how a sequence ends, for each matcher and its tokens.

        It never raises.
        """
        if not asked:
            return []
        with self._lock:
            try:
                return self._asked(asked)
            except _DeathError:
                logger.warning("The process that makes masks has ended; another is started.")
            # One of them may be the cause, and then it is the only one to end.
            return [self._asked_alone(matcher, token_ids) for matcher, token_ids in asked]

    def close(self) -> None:
        """End the process, and who waits for it."""
        sockets = self._sockets
        for connection in sockets or ():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with self._lock, self._grammar_lock:
            self._disconnect()

    def _asked_alone(self, matcher: _Matcher, token_ids: Sequence[int]) -> Outcome:
        try:
            return self._asked([(matcher, token_ids)])[0]
        except _DeathError as error:
            logger.warning("A sequence is ended with the process of its grammar: %s", error)
            return FinishReason.ERROR

    def _asked(self, asked: Sequence[tuple[_Matcher, Sequence[int]]]) -> list[Outcome]:
        life, sockets = self._loaded({matcher.grammar for matcher, _ in asked})
        connection, _ = sockets
        question = AskMasks(
            [matcher.ask(token_ids, life) for matcher, token_ids in asked],
            _drained(self._ended_sequence_ids),
            _drained(self._ended_grammar_ids),
        )
        try:
            connection.settimeout(MAX_STEP_S + _SPARE_S)
            write_frame(connection, msgspec.msgpack.encode(question))
            answer = msgspec.msgpack.decode(read_frame(connection), type=Masks)
        except (OSError, EOFError) as error:
            with self._grammar_lock:
                # Who compiles may have started another by now.
                if self._sockets is sockets:
                    self._disconnect()
            raise _DeathError(error) from error
        for complaint in answer.complaints:
            logger.warning("A sequence is ended: %s.", complaint)
        size = self.num_mask_bytes
        return [
            answer.ends.get(row) or answer.words[row * size : (row + 1) * size]
            for row in range(len(asked))
        ]

    def _loaded(
        self, grammars: Iterable[CompiledGrammar]
    ) -> tuple[int, tuple[socket.socket, socket.socket]]:
        """Return a process that has all of these grammars: which one it is, and its sockets."""
        for _ in range(_MOST_LIVES):
            with self._grammar_lock:
                life, sockets = self._life, self._sockets
            missing = [one for one in grammars if sockets is None or one.life != life]
            if sockets is not None and not missing:
                return life, sockets
            try:
                for grammar in missing:
                    self._load(grammar)
            except (EngineError, OSError) as error:
                # There is no process, or it does not take what it took once.
                raise _DeathError(error) from error
        raise _DeathError("One after another has ended.")

    def _load(self, grammar: CompiledGrammar) -> int:
        with self._grammar_lock:
            if self._sockets is None:
                self._sockets = self._connect()
                self._life += 1
            _, connection = self._sockets
            try:
                connection.settimeout(_LOAD_S)
                load = Load(grammar.id, grammar.text, _drained(self._ended_grammar_ids))
                write_frame(connection, msgspec.msgpack.encode(load))
                answer = msgspec.msgpack.decode(read_frame(connection), type=Loaded | LoadFailed)
            except (OSError, EOFError) as error:
                self._disconnect()
                raise _DeathError(error) from error
            if isinstance(answer, LoadFailed):
                raise EngineError(f"A compiled grammar was not taken: {answer.message}.")
            grammar.life = self._life
            return answer.num_bytes

    def _disconnect(self) -> None:
        if self._sockets is not None:
            for connection in self._sockets:
                connection.close()
            self._sockets = None


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

    def masks(self, asked: Sequence[tuple[_Matcher, Sequence[int]]]) -> list[Outcome]:
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


def _drained(ids: deque[int]) -> list[int]:
    drained = []
    # Two threads may do so at once.
    with contextlib.suppress(IndexError):
        while True:
            drained.append(ids.popleft())
    return drained
