"""The responses that a replica keeps, and those of its deployment's other replicas.

A response's id names the replica that keeps it, so that any replica finds it. How replicas call
each other is not known here.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from cluster.serving.openai.bodies.chat_body import MAX_MESSAGES
from cluster.serving.responses.response_ids import id_of_response, replica_of
from cluster.serving.responses.stored_responses import StoredTurn
from cluster.serving.text.templates.chat_prompt import ChatMessage
from pagedray.errors import InvalidRequestError, UnknownPreviousError, UnknownResponseError

if TYPE_CHECKING:
    from cluster.serving.continuation import Continuation
    from cluster.serving.responses.stored_responses import StoredResponses

__all__ = ["Action", "Kept", "LostReplicaError", "OtherReplicas", "ResponseStore"]

Action = Literal["continue", "delete", "items", "read"]


class LostReplicaError(Exception):
    """A replica has ended or does not respond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a replica returns about a response that it keeps."""

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
        """Return what another replica keeps; None if it keeps no such response of the tenant.

        Raises LostReplicaError.
        """


class ResponseStore:
    """Finds, keeps and deletes responses. Used from the event loop only."""

    def __init__(self, stored: StoredResponses, others: OtherReplicas | None = None) -> None:
        """`stored` are those of this replica; `others` is None if it is the only one."""
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
        """Return what another replica requests; None if it is not kept here."""
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
