"""What requests share: keys of prompts, and who sent them."""

from __future__ import annotations

from cluster.serving.ray_serve.placement import Owners, RoutingKey, prefix_key
from cluster.serving.text.templates.chat_prompt import ChatMessage, ChatPrompt


def test_later_turns_of_a_conversation_keep_its_key() -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "And now?"},
    ]
    key = prefix_key(turns[:2])
    assert key == prefix_key(turns)
    assert key != prefix_key([turns[0], turns[3]])
    # In every representation.
    messages = tuple(ChatMessage(role=one["role"], content=one["content"]) for one in turns)
    assert prefix_key(ChatPrompt(messages)) == key


def test_prompts_with_a_common_prefix_have_one_key() -> None:
    assert prefix_key("x" * 2000) == prefix_key("x" * 1024 + "y")
    assert prefix_key("x" * 1023 + "y") != prefix_key("x" * 1024)
    assert prefix_key([7] * 300) == prefix_key((7,) * 400)
    assert prefix_key("") is None
    assert prefix_key(()) is None
    assert prefix_key("\ud800") is not None
    assert prefix_key([1, object()]) is None  # type: ignore[arg-type]  # a program's mistake


def test_a_session_id_carries_a_key_and_its_owner() -> None:
    key = RoutingKey("prefix-1", "a" * 32)
    assert RoutingKey.of_session_id(key.as_session_id()) == key
    assert RoutingKey.of_session_id("mine") == RoutingKey("mine")


def test_owners_are_told_apart_by_their_credentials_within_a_process() -> None:
    owners = Owners()
    given = ["Bearer a", "Bearer b", "", None]
    digests = [owners.owner_of(one) for one in given]
    assert len(set(digests)) == 4
    assert digests == [owners.owner_of(one) for one in given]
    assert Owners().owner_of("Bearer a") not in digests
