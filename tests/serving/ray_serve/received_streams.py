"""Reads the streams that clients have received, each as a whole."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pagedray.v1 import pagedray_pb2 as pb

if TYPE_CHECKING:
    from tests.serving.ray_serve.proxied_clients import Context

__all__ = ["error_of", "read_events", "read_grpc", "read_http", "read_messages", "read_responses"]


def error_of(received: list[Any]) -> dict[str, Any]:  # Any: ASGI messages, JSON
    """Return the error that ends a stream of events."""
    assert not received[-1].get("more_body", False)
    events = b"".join(one["body"] for one in received[1:]).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    error: dict[str, Any] = json.loads(events[-3].removeprefix("data: "))["error"]  # Any: JSON
    return error


def read_grpc(context: Context, kind: Any) -> dict[str, Any]:  # Any: a message class
    """Return what the messages of a complete stream say together, each thing once."""
    messages = [kind.FromString(body) for body in context.written]
    assert [one.HasField("prompt_info") for one in messages] == [True] + [False] * (
        len(messages) - 1
    )
    assert [one.HasField("usage") for one in messages] == [False] * (len(messages) - 1) + [True]
    sequences: dict[int, dict[str, Any]] = {}  # Any: see above
    for one in (one for message in messages for one in message.sequences):
        found = sequences.setdefault(
            one.index, {"text": "", "ids": [], "logprobs": [], "end": None, "calls": {}}
        )
        assert found["end"] is None
        found["text"] += one.content if kind is pb.ChatResponse else one.text
        found["ids"] += one.token_ids
        found["logprobs"] += [str(logprobs) for logprobs in one.logprobs]
        for call in getattr(one, "tool_calls", ()):
            _add_call(found["calls"], call.index, call.id, call.name, call.arguments)
        if one.finish_reason:
            found["end"] = (one.finish_reason, one.stop_reason)
    assert all(one["end"] for one in sequences.values())
    return {
        "sequences": sequences,
        "ids": len({one.request_id for one in messages}),
        "prompt": str(messages[0].prompt_info),
        "usage": str(messages[-1].usage),
    }


def read_http(received: list[Any]) -> dict[str, Any]:  # Any: ASGI messages, JSON
    """Return what the events of a complete stream say together, each thing once."""
    assert [one["type"] for one in received].count("http.response.start") == 1
    assert [one.get("more_body", False) for one in received[1:]] == [True] * (len(received) - 2) + [
        False
    ]
    assert all(set(one) <= {"type", "body", "more_body"} for one in received[1:])
    events = b"".join(one["body"] for one in received[1:]).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(one.removeprefix("data: ")) for one in events[:-2]]
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        found = choices.setdefault(
            choice["index"], {"text": "", "logprobs": [], "end": None, "calls": {}, "roles": 0}
        )
        assert found["end"] is None
        delta = choice.get("delta", {})
        found["text"] += choice.get("text", "") + (delta.get("content") or "")
        found["roles"] += "role" in delta
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            _add_call(
                found["calls"],
                call["index"],
                call.get("id", ""),
                function.get("name", ""),
                function["arguments"],
            )
        logprobs = choice["logprobs"]
        if logprobs:
            parts = logprobs.get("content")
            parts = parts or list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))
            found["logprobs"] += parts
        if choice["finish_reason"]:
            found["end"] = (choice["finish_reason"], choice["stop_reason"])
    assert all(one["end"] for one in choices.values())
    return {
        "choices": choices,
        "heads": len({(chunk["id"], chunk["created"]) for chunk in chunks}),
        "usage": [chunk["usage"] for chunk in chunks if chunk.get("usage")],
    }


def _add_call(calls: dict[int, Any], index: int, id_: str, name: str, arguments: str) -> None:
    found = calls.setdefault(index, {"ids": 0, "name": name, "arguments": ""})
    found["ids"] += bool(id_)
    found["arguments"] += arguments


def read_events(received: list[Any]) -> list[Any]:  # Any: ASGI messages, JSON
    """Return the events of a stream whose events have names."""
    events = b"".join(one["body"] for one in received[1:]).decode().split("\n\n")
    assert events[-1] == ""
    return [json.loads(one.partition("\ndata: ")[2]) for one in events[:-1]]


def read_responses(events: list[Any]) -> list[Any]:  # Any: JSON
    """Return the items that a stream of Responses builds up, each with its text."""
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    items: list[dict[str, Any]] = []  # Any: JSON
    for event in events:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append({**event["item"], "arguments": "", "text": ""})
        elif event["type"].endswith(".delta"):
            is_call = event["type"].startswith("response.function_call")
            items[event["output_index"]]["arguments" if is_call else "text"] += event["delta"]
    names = "type", "id", "call_id", "name"
    shown = [[item.get(name) for name in names] for item in items]
    final = events[-1]["response"]["output"]
    # A client may answer the calls of the stream, and others those of the last event.
    assert [[item.get(name) for name in names] for item in final] == shown
    return [(item["type"], item.get("name"), item["arguments"], item["text"]) for item in items]


def read_messages(events: list[Any]) -> list[Any]:  # Any: JSON
    """Return the blocks that a stream of Messages builds up."""
    assert [event["type"] for event in events].count("message_start") == 1
    blocks: list[list[str]] = []
    num_ended = 0
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks) == num_ended
            block = event["content_block"]
            blocks.append([block["type"], block.get("name", ""), ""])
        elif event["type"] == "content_block_delta":
            assert event["index"] == num_ended
            delta = event["delta"]
            assert delta["type"] == (
                "text_delta" if blocks[-1][0] == "text" else "input_json_delta"
            )
            blocks[-1][2] += delta.get("text", "") + delta.get("partial_json", "")
        elif event["type"] == "content_block_stop":
            num_ended += 1
    assert num_ended == len(blocks)
    return blocks
