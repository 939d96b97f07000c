"""Items of the Responses API: messages, function calls and their results, and pages of items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from pydantic import Field

from cluster.serving.json_body import (
    OpenPart,
    check_counts,
    described,
    missing_field,
    named_schema,
    read_arguments,
    read_part,
)
from cluster.serving.openai.bodies.messages import RefusalPart, TextPart
from cluster.serving.text.template_arguments import ChatMessage, MessageToolCall
from cluster.serving.tools.tool import MAX_ID_LENGTH, MAX_TOOLS, NAME_PATTERN, Tool, check_id
from pagedray.errors import InvalidRequestError, invalid_field
from pagedray.text import nearest_name, quote, quote_json

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from starlette.datastructures import QueryParams

    from cluster.serving.http.endpoint import Json

__all__ = [
    "ITEMS",
    "FunctionName",
    "FunctionTool",
    "FunctionTools",
    "ItemsQuery",
    "NamespaceTool",
    "check_included_fields",
    "check_whole",
    "items_page",
    "read_items",
    "size_of_items",
]

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
INCLUDE = "include"
"""The name of the parameter."""
_LOGPROBS = "message.output_text.logprobs"
_WITHOUT_EFFECT = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""Fields of items that no response has, or that are optional."""
_LIST = "[]"
"""Ends the name of a list, as OpenAI's clients write it."""


class MessageItem(OpenPart):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Any = Field(  # Any: read where it is used
        json_schema_extra={
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {"anyOf": [named_schema("TextPart"), named_schema("RefusalPart")]},
                },
            ]
        }
    )


class FunctionCallItem(OpenPart):
    """A tool call of the assistant."""

    type: Literal["function_call"]
    call_id: str = Field(json_schema_extra={"maxLength": MAX_ID_LENGTH})
    name: str = Field(json_schema_extra={"maxLength": MAX_ID_LENGTH})
    namespace: str | None = Field(None, json_schema_extra={"maxLength": MAX_ID_LENGTH})
    arguments: str = described("A JSON object as a string.", ...)
    is_async: Literal[False] = Field(False, alias="async")


class FunctionOutputItem(OpenPart):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str = Field(json_schema_extra={"maxLength": MAX_ID_LENGTH})
    output: Any = Field(  # Any: read where it is used
        json_schema_extra={
            "anyOf": [{"type": "string"}, {"type": "array", "items": named_schema("TextPart")}]
        }
    )
    name: str | None = Field(None, json_schema_extra={"maxLength": MAX_ID_LENGTH})
    namespace: str | None = Field(None, json_schema_extra={"maxLength": MAX_ID_LENGTH})


class ReasoningItem(OpenPart):
    """What the model thought; the chat template decides whether it is read."""

    type: Literal["reasoning"]
    content: Any = Field(  # Any: read where it is used
        None, json_schema_extra={"type": "array", "items": {"type": "object"}}
    )


_Item = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem

ITEMS: Mapping[str, type[_Item]] = {
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "message": MessageItem,
    "reasoning": ReasoningItem,
}


class _Turns:
    """Collects messages; consecutive text, reasoning and calls of the assistant are one of them."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[MessageToolCall] = []
        self._is_open = False

    def add(self, message: ChatMessage) -> None:
        """Add a message of another role."""
        self.end()
        self.messages.append(message)

    def say(self, text: str) -> None:
        if self._texts or self._calls:
            self.end()
        self._is_open = True
        self._texts.append(text)

    def think(self, text: str) -> None:
        if self._texts or self._calls:
            self.end()
        if text:
            self._is_open = True
            self._thoughts.append(text)

    def call(self, call: MessageToolCall) -> None:
        self._is_open = True
        self._calls.append(call)

    def end(self) -> None:
        """End the assistant's turn, if it is open."""
        if self._is_open:
            reasoning = "".join(self._thoughts) if self._thoughts else None
            text, calls = "".join(self._texts), tuple(self._calls)
            self.messages.append(
                ChatMessage("assistant", text, tool_calls=calls, reasoning=reasoning)
            )
        self._texts, self._thoughts, self._calls = [], [], []
        self._is_open = False


def read_items(given: object) -> tuple[ChatMessage, ...]:
    """Return the messages for the chat template. Raises InvalidRequestError."""
    if isinstance(given, str):
        return (ChatMessage("user", given),)
    if not isinstance(given, list) or not given:
        raise invalid_field("input", "must be a string or a non-empty list of items.")
    items: list[_Item] = []
    for index, one in enumerate(given):
        items.append(_item_of(one, f"input.{index}"))
    arguments = "".join(one.arguments for one in items if isinstance(one, FunctionCallItem))
    check_counts(arguments.encode("utf-8", "surrogatepass"), "The arguments of calls")
    turns = _Turns()
    for index, item in enumerate(items):
        _add_item(item, turns, f"input.{index}")
    turns.end()
    return tuple(turns.messages)


def _add_item(item: _Item, turns: _Turns, where: str) -> None:
    if isinstance(item, MessageItem):
        text = _text_of(item.content, f"{where}.content", role=item.role)
        if item.role == "assistant":
            turns.say(text)
        else:
            turns.add(ChatMessage("system" if item.role == "developer" else item.role, text))
    elif isinstance(item, FunctionCallItem):
        turns.call(_call_of(item, where))
    elif isinstance(item, FunctionOutputItem):
        check_id(item.call_id, f"{where}.call_id")
        text = _text_of(item.output, f"{where}.output", role="tool")
        name = None
        if item.name is not None:
            name = model_name(item.name, item.namespace)
            check_id(name, f"{where}.name")
        turns.add(ChatMessage("tool", text, tool_call_id=item.call_id, name=name))
    else:
        turns.think(_thoughts_of(item.content, f"{where}.content"))


def _item_of(given: object, where: str) -> _Item:
    if not isinstance(given, dict):
        raise invalid_field(where, "must be an object.")
    if not given.get("type") and given.get("role") is None:
        # Only messages may do without their type.
        raise missing_field(("type", "role"), given, where, ITEMS.values())
    kind = given.get("type") or "message"
    part = ITEMS.get(kind) if isinstance(kind, str) else None
    if part is None:
        shown = kind[:40] if isinstance(kind, str) and kind.isidentifier() else "this kind"
        raise invalid_field(
            where,
            f"is not supported: items of {shown}; the model reads {', '.join(sorted(ITEMS))}.",
        )
    return read_part(part, given, where)


def _text_of(given: object, where: str, *, role: str) -> str:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise invalid_field(where, "must be a string or a list of text parts.")
    texts: list[str] = []
    for index, one in enumerate(given):
        texts.append(_part_text(one, f"{where}.{index}", role))
    return "".join(texts)


def _part_text(given: object, where: str, role: str) -> str:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind in ("input_image", "input_file", "input_audio", "computer_screenshot"):
        raise invalid_field(
            where, f"is not supported: the model only reads text, not {kind} parts."
        )
    if kind == "refusal" and role == "assistant":
        return read_part(RefusalPart, given, where).refusal
    return read_part(TextPart, given, where).text


def _thoughts_of(given: object, where: str) -> str:
    if given is None:
        return ""
    texts = [one.get("text") if isinstance(one, dict) else None for one in _list_of(given, where)]
    if not all(isinstance(text, str) for text in texts):
        raise invalid_field(where, "must have parts with a text.")
    return "".join(text for text in texts if isinstance(text, str))


def _list_of(given: object, where: str) -> Sequence[object]:
    if isinstance(given, list):
        return given
    raise invalid_field(where, "must be a list.")


def _call_of(item: FunctionCallItem, where: str) -> MessageToolCall:
    check_id(item.call_id, f"{where}.call_id")
    name = model_name(item.name, item.namespace)
    check_id(item.name, f"{where}.name")
    check_id(name, f"{where}.namespace")
    arguments = read_arguments(item.arguments, f"{where}.arguments")
    return MessageToolCall(id=item.call_id, name=name, arguments=arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemsQuery:
    """Which items a client requests."""

    after: str | None = None
    """The id of the item before the first item."""
    limit: int = 20
    is_ascending: bool = False

    @classmethod
    def from_params(cls, params: QueryParams) -> ItemsQuery:
        """Return the requested query. Raises InvalidRequestError."""
        given = read_query(params, ("after", "include", "limit", "order"))
        check_include(params)
        limit, order = given.get("limit", "20"), given.get("order", "desc")
        is_number = limit.isascii() and limit.isdecimal() and len(limit) < 4
        if not (is_number and 1 <= int(limit) <= _MOST_ITEMS):
            raise invalid_field(
                "limit", f"must be an integer from 1 to {_MOST_ITEMS}, not {quote(limit)}."
            )
        if order not in _ORDERS:
            raise invalid_field("order", f"must be asc or desc, not {quote(order)}.")
        return cls(after=given.get("after"), limit=int(limit), is_ascending=order == "asc")


@dataclass(frozen=True, slots=True)
class _ListedItem:
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
            raise invalid_field(
                "after", f"must be the id of an item of the input, not {quote(query.after)}."
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


def _items_of(message: ChatMessage) -> Iterator[_ListedItem]:
    if message.role == "tool":
        yield _ListedItem("function_call_output", message)
        return
    if message.reasoning:
        yield _ListedItem("reasoning", message)
    # An answer may be nothing but calls, or empty.
    if message.content or not (message.tool_calls or message.reasoning):
        yield _ListedItem("message", message)
    for call in message.tool_calls:
        yield _ListedItem("function_call", message, call)


def check_included_fields(names: Iterable[object]) -> None:
    """Raise InvalidRequestError for log-probabilities, and names unknown to OpenAI's API."""
    for name in names:
        if name == _LOGPROBS:
            raise InvalidRequestError(
                f"{_LOGPROBS} is not supported in include: use /v1/chat/completions.", param=INCLUDE
            )
        if name not in _WITHOUT_EFFECT:
            raise InvalidRequestError(
                f"include may contain {', '.join(_WITHOUT_EFFECT)}, not {quote_json(name)}.",
                param=INCLUDE,
            )


def read_query(params: QueryParams, known: Collection[str]) -> dict[str, str]:
    """Return the values of parameters by name.

    Raises InvalidRequestError for an unknown parameter.
    """
    found: dict[str, str] = {}
    for given, value in params.multi_items():
        name = given.removesuffix(_LIST)
        if name not in known:
            nearest = nearest_name(name, known)
            hint = "." if nearest is None else f": did you mean {nearest}?"
            shown = name if name.isidentifier() and len(name) <= 64 else quote(name)
            raise invalid_field(shown, f"is not supported in the query{hint}")
        if name in found and name != INCLUDE:
            raise invalid_field(name, "is given twice in the query.")
        found[name] = value
    return found


def check_include(params: QueryParams) -> None:
    """Raise InvalidRequestError if a client requests fields that it cannot have."""
    values = (*params.getlist(INCLUDE), *params.getlist(INCLUDE + _LIST))
    check_included_fields(name for value in values for name in value.split(","))


def check_whole(params: QueryParams) -> None:
    """Check that a client reads a response as a whole. Raises InvalidRequestError."""
    given = read_query(params, (INCLUDE, "include_obfuscation", "starting_after", "stream"))
    check_include(params)
    if given.get("stream", "false") != "false":
        raise invalid_field("stream", "must be false: a stored response is complete.")
    if "starting_after" in given:
        raise invalid_field("starting_after", "is not supported: a stored response is complete.")


class FunctionTool(OpenPart):
    """A function that the model may call."""

    type: Literal["function"]
    name: str = Field(json_schema_extra={"pattern": NAME_PATTERN})
    description: str | None = None
    parameters: Any = Field(None, json_schema_extra={"type": "object"})  # Any: a JSON schema
    strict: bool | None = described("Whether calls that are not forced follow the schema, too.")
    defer_loading: Literal[False] = False
    is_async: Literal[False] = Field(False, alias="async")
    allowed_callers: list[Literal["direct"]] | None = None


class NamespaceTool(OpenPart):
    """Functions that share a namespace; the model reads its name and a dot before theirs."""

    type: Literal["namespace"]
    name: str = Field(json_schema_extra={"pattern": "^[A-Za-z0-9_.-]{1,126}$"})
    description: str | None = described("Ignored; the descriptions of the functions are used.")
    tools: Any = Field(  # Any: read separately, which keeps nulls in schemas
        json_schema_extra={
            "type": "array",
            "items": named_schema("FunctionTool"),
            "maxItems": MAX_TOOLS,
        }
    )


@dataclass(frozen=True, slots=True)
class FunctionName:
    """The name of a function as clients know it."""

    name: str
    namespace: str | None = None


class FunctionTools:
    """The functions of a call."""

    def __init__(self) -> None:
        self.tools: list[Tool] = []
        """Named as the model knows them."""
        self.names: dict[str, FunctionName] = {}
        """The names of functions in namespaces, by the names that the model knows."""

    def read(self, given: object, param: str = "tools") -> None:
        """Read the tools of a parameter. Raises InvalidRequestError."""
        if given is None:
            return
        if not isinstance(given, list):
            raise invalid_field(param, "must be a list.")
        for index, one in enumerate(given):
            where = f"{param}.{index}"
            if isinstance(one, dict) and one.get("type") == "namespace":
                self._read_namespace(one, where)
            else:
                self.tools.append(_tool_of(one, where))

    def _read_namespace(self, given: dict[str, object], where: str) -> None:
        inside = given.get("tools")
        # Nulls in the schemas are values.
        read = read_part(NamespaceTool, {**given, "tools": []} if inside else given, where)
        if not isinstance(inside, list) or len(inside) > MAX_TOOLS:
            param = f"{where}.tools"
            raise invalid_field(param, f"must be a list of at most {MAX_TOOLS} functions.")
        for index, one in enumerate(inside):
            tool = _tool_of(one, f"{where}.tools.{index}", namespace=read.name)
            self.tools.append(tool)
            own = tool.name.removeprefix(f"{read.name}.")
            self.names[tool.name] = FunctionName(own, read.name)


def model_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model knows a function."""
    return f"{namespace}.{name}" if namespace else name


def _tool_of(given: object, where: str, *, namespace: str | None = None) -> Tool:
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(given, dict) and kind != "function" and kind is not None:
        raise invalid_field(
            f"{where}.type",
            f"must be function{('' if namespace else ' or namespace')}: OpenAI's own tools are "
            "not available.",
        )
    schema = given.get("parameters") if isinstance(given, dict) else None
    # Nulls in the schema are values.
    kept = {**given, "parameters": {}} if isinstance(given, dict) and schema else given
    read = read_part(FunctionTool, kept, where)
    if schema is not None and not isinstance(schema, Mapping):
        param = f"{where}.parameters"
        raise invalid_field(param, "must be a JSON Schema object.")
    name = model_name(read.name, namespace)
    tool = Tool(
        name=name,
        description=read.description,
        parameters=schema,
        is_strict=bool(read.strict),
        extra=read.model_extra,
    )
    tool.check_limits(where, schema_param=f"{where}.parameters")
    return tool
