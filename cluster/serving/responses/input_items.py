"""The input of a stored response as a page of items, the newest first unless clients ask otherwise.

These are the items of its whole conversation: of earlier responses too, and their output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from cluster.serving.responses.query import check_include, read_query
from cluster.serving.text.templates.chat_prompt import ChatMessage, MessageToolCall
from pagedray.errors import InvalidRequestError
from pagedray.text import quote

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from starlette.datastructures import QueryParams

    from cluster.serving.http.errors import Json

__all__ = ["ItemsQuery", "items_page", "size_of_items"]

_encode = msgspec.json.Encoder().encode

_MOST_ITEMS = 100
_ITEM_BYTES = 256
_CALL_BYTES = 2**14
"""Bytes of a call with long arguments."""
_ORDERS = ("asc", "desc")

_Kind = Literal["message", "reasoning", "function_call", "function_call_output"]
_PREFIXES: dict[_Kind, str] = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemsQuery:
    """Which items a client requests."""

    after: str | None = None
    """The id of the item before the first one."""
    limit: int = 20
    is_ascending: bool = False

    @classmethod
    def from_params(cls, params: QueryParams) -> ItemsQuery:
        """Return what a query requests. Raises InvalidRequestError."""
        given = read_query(params, ("after", "include", "limit", "order"))
        check_include(params)
        limit, order = given.get("limit", "20"), given.get("order", "desc")
        is_number = limit.isascii() and limit.isdecimal() and len(limit) < 4
        if not (is_number and 1 <= int(limit) <= _MOST_ITEMS):
            raise InvalidRequestError(
                f"limit must be an integer from 1 to {_MOST_ITEMS}, not {quote(limit)}.",
                param="limit",
            )
        if order not in _ORDERS:
            raise InvalidRequestError(
                f"order must be asc or desc, not {quote(order)}.", param="order"
            )
        return cls(after=given.get("after"), limit=int(limit), is_ascending=order == "asc")


@dataclass(frozen=True, slots=True)
class _Item:
    """An item, or where it is in a message."""

    kind: _Kind
    message: ChatMessage
    call: MessageToolCall | None = None

    def as_json(self, item_id: str) -> Json:
        message, call = self.message, self.call
        written: Json = {"id": item_id, "type": self.kind, "status": "completed"}
        if call is not None:
            arguments = _encode(call.arguments).decode()
            return written | {"call_id": call.id, "name": call.name, "arguments": arguments}
        if self.kind == "function_call_output":
            named = {} if message.name is None else {"name": message.name}
            return written | {"call_id": message.tool_call_id, "output": message.content, **named}
        if self.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": message.reasoning}]
            return written | {"summary": [], "content": content}
        part: Json = {"type": "input_text", "text": message.content}
        if message.role == "assistant":
            part |= {"type": "output_text", "annotations": [], "logprobs": []}
        return written | {"role": message.role, "content": [part]}


def items_page(messages: Sequence[ChatMessage], response_id: str, query: ItemsQuery) -> bytes:
    """Return a page of the items of messages in JSON. Raises InvalidRequestError."""
    items = [item for message in messages for item in _items_of(message)]
    number = response_id.removeprefix("resp_")

    def id_at(place: int) -> str:
        return f"{_PREFIXES[items[place].kind]}_{number}_{place}"

    places = range(len(items)) if query.is_ascending else range(len(items) - 1, -1, -1)
    if query.after is not None:
        end = query.after.rpartition("_")[2]
        is_place = end.isascii() and end.isdecimal() and len(end) <= len(str(len(items)))
        if not (is_place and int(end) in places and id_at(int(end)) == query.after):
            raise InvalidRequestError(
                f"after must be the id of an item of the input, not {quote(query.after)}.",
                param="after",
            )
        places = places[places.index(int(end)) + 1 :]
    chosen = places[: query.limit]
    written = [_encode(items[place].as_json(id_at(place))) for place in chosen]
    rest: Json = {
        "first_id": id_at(chosen[0]) if chosen else None,
        "last_id": id_at(chosen[-1]) if chosen else None,
        "has_more": len(chosen) < len(places),
    }
    return b'{"object":"list","data":[%b],%b' % (b",".join(written), _encode(rest)[1:])


def size_of_items(messages: Sequence[ChatMessage]) -> int:
    """Return about how many bytes all items of messages have in JSON.

    Arguments of calls are not looked at, which would take as long as to write them.
    """
    return sum(
        _ITEM_BYTES
        + len(one.content)
        + len(one.reasoning or "")
        + _CALL_BYTES * len(one.tool_calls)
        for one in messages
    )


def _items_of(message: ChatMessage) -> Iterator[_Item]:
    if message.role == "tool":
        yield _Item("function_call_output", message)
        return
    if message.reasoning:
        yield _Item("reasoning", message)
    # An answer may be nothing but calls, or empty.
    if message.content or not (message.tool_calls or message.reasoning):
        yield _Item("message", message)
    for call in message.tool_calls:
        yield _Item("function_call", message, call)
