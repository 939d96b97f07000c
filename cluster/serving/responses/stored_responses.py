"""Responses in memory, which clients continue, read and delete by their ids."""

from __future__ import annotations

import re
import secrets
import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from cluster.serving.intake import BufferLimits, TenantBytes
from cluster.serving.openai.bodies.chat_body import MAX_MESSAGES
from cluster.serving.text.template_arguments import ChatMessage
from pagedray.errors import InvalidRequestError, UnknownPreviousError, UnknownResponseError

if TYPE_CHECKING:
    from cluster.serving.continuation import Continuation

__all__ = [
    "Action",
    "Kept",
    "LostReplicaError",
    "ResponseStore",
    "StoreLimits",
    "StoredResponses",
    "StoredTurn",
    "replica_of",
]

_TURN_BYTES = 2048
_MESSAGE_BYTES = 256
_VALUE_BYTES = 64
_ID = re.compile(r"resp_(?P<replica>[A-Za-z0-9]{1,32})_[0-9a-f]{32}")

Action = Literal["continue", "delete", "items", "read"]


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """How many responses are kept."""

    num_responses: int = 1000
    """Number of responses for each tenant; 0 stores none."""
    memory: BufferLimits = field(default_factory=BufferLimits)


class StoredTurn:
    """The part of a conversation that a response adds.

    It is kept while a response that clients can name is this turn or continues it.
    """

    def __init__(
        self,
        body: bytes,
        messages: tuple[ChatMessage, ...],
        previous: StoredTurn | None,
        *,
        num_given: int = 0,
        problem: str = "",
    ) -> None:
        """`body` is the response in JSON, `messages` are its input and output.

        The first `num_given` messages are its input. A `problem` says why it cannot be continued.
        """
        self.problem = problem
        self.body = body
        self.messages = messages
        self.num_given = num_given
        self.previous = previous
        self.num_holders = 0
        """Whether clients can name it, and the turns that continue it."""
        self.num_bytes = _TURN_BYTES + len(body) + sum(map(_size_of, messages))
        self.conversation_bytes = self.num_bytes
        self.num_messages = len(messages)
        if previous is not None:
            self.conversation_bytes += previous.conversation_bytes
            self.num_messages += previous.num_messages

    def conversation(self) -> tuple[ChatMessage, ...]:
        """Return all messages up to the end of this turn."""
        return self.given() + self.messages[self.num_given :]

    def given(self) -> tuple[ChatMessage, ...]:
        """Return all messages up to the end of this turn's input."""
        turns = [self.messages[: self.num_given]]
        turn = self.previous
        while turn is not None:
            turns.append(turn.messages)
            turn = turn.previous
        return tuple(message for messages in reversed(turns) for message in messages)


class StoredResponses:
    """The responses of all tenants. Used from the event loop only.

    At a limit, the oldest response of a tenant is forgotten: the same tenant's at its own limits,
    that of the tenant with the most bytes at the limit of the server.
    """

    def __init__(self, limits: StoreLimits) -> None:
        self._limits = limits
        self._bytes = TenantBytes(limits.memory)
        self._by_tenant: dict[str, OrderedDict[str, StoredTurn]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_tenant.values()))

    @property
    def is_enabled(self) -> bool:
        """Whether responses may be stored at all."""
        return self._limits.num_responses > 0

    @property
    def num_bytes(self) -> int:
        """The memory of all turns."""
        return self._bytes.num_bytes

    def find(self, tenant: str, response_id: str) -> StoredTurn:
        """Return a tenant's response. Raises UnknownResponseError."""
        turn = self._found(tenant, response_id)
        if turn is None:
            raise UnknownResponseError(response_id)
        return turn

    def find_previous(self, tenant: str, response_id: str, max_messages: int) -> StoredTurn:
        """Return the response that a call continues.

        Raises InvalidRequestError if there is none, or its conversation is too long.
        """
        turn = self._found(tenant, response_id)
        if turn is None:
            raise UnknownPreviousError(response_id)
        if turn.problem:
            raise InvalidRequestError(
                f"The response of previous_response_id cannot be continued: {turn.problem} Send "
                "the earlier items as input.",
                param="previous_response_id",
            )
        if turn.num_messages >= max_messages:
            raise InvalidRequestError(
                f"The conversation of previous_response_id has {turn.num_messages} messages; at "
                f"most {max_messages - 1} are allowed.",
                param="previous_response_id",
            )
        most = self._limits.memory.call_bytes
        if turn.conversation_bytes > most:
            raise InvalidRequestError(
                f"The conversation of previous_response_id takes {turn.conversation_bytes} bytes "
                f"of memory; at most {most} are allowed.",
                param="previous_response_id",
            )
        return turn

    def keep(self, tenant: str, response_id: str, turn: StoredTurn) -> None:
        """Keep a response, unless it is too large."""
        memory = self._limits.memory
        if not self.is_enabled or turn.num_bytes > memory.call_bytes:
            return
        if self._found(tenant, response_id) is not None:
            # Serve's proxy has a call run again if it saw no end of the first run.
            self._forget(tenant, response_id)
        own = self._by_tenant.setdefault(tenant, OrderedDict())
        own[response_id] = turn
        turn.num_holders += 1
        if turn.previous is not None:
            self._hold(tenant, turn.previous)
        self._bytes.count(tenant, turn.num_bytes)
        while len(own) > self._limits.num_responses or (
            self._bytes.full_scope(tenant, 0) == "tenant"
        ):
            self._forget_oldest(tenant)
        while self._bytes.full_scope(tenant, 0) == "server":
            self._forget_oldest(max(self._by_tenant, key=self._bytes.held_by))

    def delete(self, tenant: str, response_id: str) -> None:
        """Forget a response; its continuations stay. Raises UnknownResponseError."""
        self.find(tenant, response_id)
        self._forget(tenant, response_id)

    def _found(self, tenant: str, response_id: str) -> StoredTurn | None:
        own = self._by_tenant.get(tenant)
        return None if own is None else own.get(response_id)

    def _hold(self, tenant: str, turn: StoredTurn) -> None:
        """Count another turn that continues a turn."""
        held: StoredTurn | None = turn
        # It may have been forgotten while the response that continues it was generated.
        while held is not None:
            held.num_holders += 1
            if held.num_holders > 1:
                return
            self._bytes.count(tenant, held.num_bytes)
            held = held.previous

    def _forget_oldest(self, tenant: str) -> None:
        self._forget(tenant, next(iter(self._by_tenant[tenant])))

    def _forget(self, tenant: str, response_id: str) -> None:
        own = self._by_tenant[tenant]
        turn: StoredTurn | None = own.pop(response_id)
        if not own:
            del self._by_tenant[tenant]
        while turn is not None:
            turn.num_holders -= 1
            if turn.num_holders:
                return
            self._bytes.count(tenant, -turn.num_bytes)
            turn = turn.previous


def _size_of(message: ChatMessage) -> int:
    """Return the bytes that a message takes in memory, or a few more."""
    texts = (message.content, message.reasoning, message.tool_call_id, message.name)
    size = _MESSAGE_BYTES + sum(sys.getsizeof(text) for text in texts if text is not None)
    for call in message.tool_calls:
        size += _MESSAGE_BYTES + sys.getsizeof(call.id) + sys.getsizeof(call.name)
        size += _value_size(call.arguments)
    return size


def _value_size(value: object) -> int:
    """Return the bytes of a value of JSON."""
    size = 0
    waiting = [value]
    while waiting:
        one = waiting.pop()
        size += sys.getsizeof(one) + _VALUE_BYTES
        if isinstance(one, Mapping):
            waiting += one.keys()
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
    return size


def id_of_response(number: str, replica: str | None = None) -> str:
    """Return an id; `number` is unique, and `replica` keeps the response if there are several."""
    return f"resp_{number}" if replica is None else f"resp_{replica}_{number}"


def replica_of(given: str) -> str | None:
    """Return the name of the replica that keeps a response; None if its id has none."""
    found = _ID.fullmatch(given)
    return None if found is None else found["replica"]


class LostReplicaError(Exception):
    """A replica has ended or does not respond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The answer of a replica about a kept response."""

    body: bytes = b""
    """The response in JSON, if it is read."""
    messages: tuple[ChatMessage, ...] = ()
    """The conversation if the response is continued, or the part before its output, for `items`."""
    problem: str = ""
    """Why the response cannot be continued; empty if it can."""


class OtherReplicas(Protocol):
    """The other replicas of a deployment, which keep responses too."""

    @property
    def own_name(self) -> str:
        """The name of this replica, of letters and digits."""

    async def ask(self, replica: str, action: Action, tenant: str, response_id: str) -> Kept | None:
        """Return the answer of another replica; None if it keeps no such response of the tenant.

        Raises LostReplicaError.
        """


class ResponseStore:
    """Finds, keeps and deletes responses. Used from the event loop only."""

    def __init__(self, stored: StoredResponses, others: OtherReplicas | None = None) -> None:
        """`stored` are the responses of this replica; `others` is None for a single replica."""
        self._stored = stored
        self._others = others

    @property
    def is_enabled(self) -> bool:
        """Whether responses may be stored at all."""
        return self._stored.is_enabled

    def keeps(self, continuation: Continuation | None) -> bool:
        """Return whether the response of a call is kept if its client wants it.

        That of a call which another replica has begun is not, because its id names that replica.
        """
        is_elsewhere = (
            self._others is not None
            and continuation is not None
            and continuation.replica not in ("", self._others.own_name)
        )
        return self.is_enabled and not is_elsewhere

    def new_id(self, continuation: Continuation | None) -> str:
        """Return the id of a call's response, which clients cannot choose or guess."""
        number = secrets.token_hex(16) if continuation is None else continuation.secret("response")
        if self._others is None:
            return id_of_response(number)
        begun = "" if continuation is None else continuation.replica
        return id_of_response(number, begun or self._others.own_name)

    def keep(self, tenant: str, response_id: str, turn: StoredTurn) -> None:
        """Keep a response, unless it is too large."""
        self._stored.keep(tenant, response_id, turn)

    async def read(self, tenant: str, response_id: str) -> bytes:
        """Return a response in JSON. Raises UnknownResponseError."""
        return (await self._found(tenant, response_id, "read")).body

    async def messages_given(self, tenant: str, response_id: str) -> tuple[ChatMessage, ...]:
        """Return the conversation before the output of a response. Raises UnknownResponseError."""
        return (await self._found(tenant, response_id, "items")).messages

    async def delete(self, tenant: str, response_id: str) -> None:
        """Forget a response. Raises UnknownResponseError."""
        await self._found(tenant, response_id, "delete")

    async def find_previous(self, tenant: str, response_id: str) -> StoredTurn:
        """Return the response that a call continues. Raises InvalidRequestError."""
        replica = self._other_replica(response_id)
        if self._others is None or replica is None:
            return self._stored.find_previous(tenant, response_id, MAX_MESSAGES)
        try:
            kept = await self._others.ask(replica, "continue", tenant, response_id)
        except LostReplicaError:
            raise UnknownPreviousError(response_id, is_lost=True) from None
        if kept is None:
            raise UnknownPreviousError(response_id)
        if kept.problem:
            raise InvalidRequestError(kept.problem, param="previous_response_id")
        return StoredTurn(b"", kept.messages, None)

    def answer(self, action: Action, tenant: str, response_id: str) -> Kept | None:
        """Serve a stored response to another replica; None if it is not kept here."""
        try:
            match action:
                case "read":
                    return Kept(body=self._stored.find(tenant, response_id).body)
                case "items":
                    return Kept(messages=self._stored.find(tenant, response_id).given())
                case "delete":
                    self._stored.delete(tenant, response_id)
                    return Kept()
            turn = self._stored.find_previous(tenant, response_id, MAX_MESSAGES)
        except (UnknownResponseError, UnknownPreviousError):
            return None
        except InvalidRequestError as error:
            return Kept(problem=str(error))
        return Kept(messages=turn.conversation())

    async def _found(self, tenant: str, response_id: str, action: Action) -> Kept:
        replica = self._other_replica(response_id)
        if self._others is None or replica is None:
            kept = self.answer(action, tenant, response_id)
        else:
            try:
                kept = await self._others.ask(replica, action, tenant, response_id)
            except LostReplicaError:
                raise UnknownResponseError(response_id, is_lost=True) from None
        if kept is None:
            raise UnknownResponseError(response_id)
        return kept

    def _other_replica(self, response_id: str) -> str | None:
        """Return the name of another replica that an id names."""
        replica = replica_of(response_id)
        return None if self._others is None or replica == self._others.own_name else replica
