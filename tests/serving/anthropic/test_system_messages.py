"""System messages during a conversation, of which some templates take only the first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cluster.serving.anthropic.conversation_body import merge_system_messages
from cluster.serving.text.templates.chat_prompt import ChatMessage
from cluster.serving.text.templates.chat_template import ChatTemplate
from tests.serving.anthropic.message_calls import RESULT, USE, posted
from tests.serving.conftest import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster.serving.text.tokenizer import Tokenizer

EACH = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
FIRST_ONLY = (
    "{# <tool_call> #}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('Not first.') }}{% endif %}"
    "{{ m.role }}={{ m.content }};{% endfor %}"
)
TO_THE_FRONT = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }};{% endfor %}"
    "{% for m in messages if m.role != 'system' %}{{ m.content }};{% endfor %}"
)
LEFT_OUT = "{% for m in messages if m.role != 'system' or loop.first %}{{ m.content }};{% endfor %}"


@pytest.fixture(scope="module")
def server(template_tokenizer: Callable[..., Tokenizer]) -> Iterator[Server]:
    with Server(template_tokenizer(FIRST_ONLY), context=1024) as server:
        yield server


@pytest.mark.parametrize(
    ("source", "keeps"),
    [(EACH, True), (FIRST_ONLY, False), (TO_THE_FRONT, False), (LEFT_OUT, False)],
)
def test_templates_show_whether_they_keep_system_messages(source: str, *, keeps: bool) -> None:
    assert ChatTemplate(source, {}, origin="").keeps_system_messages is keeps


def roles(letters: str) -> list[ChatMessage]:
    """Return messages with numbers as their texts, given by the letters of their roles."""
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [ChatMessage(names[letter], str(place)) for place, letter in enumerate(letters)]


@pytest.mark.parametrize(
    ("given", "merged"),
    [
        ("sua", ["system 0", "user 1", "assistant 2"]),
        ("ssu", ["system 0 1", "user 2"]),
        ("us", ["user 0 1"]),
        ("usas", ["user 0 1", "assistant 2", "user 3"]),
        ("uasu", ["user 0", "assistant 1", "user 2 3"]),
        ("usssa", ["user 0 1 2 3", "assistant 4"]),
        ("uatsa", ["user 0", "assistant 1", "tool 2 3", "assistant 4"]),
        # The result still follows the call.
        ("uasts", ["user 0", "assistant 1", "tool 3 2 4"]),
        ("uasa", ["user 0", "assistant 1", "user 2", "assistant 3"]),
        ("s", ["system 0"]),
    ],
)
def test_later_system_messages_stay_at_their_places(given: str, merged: list[str]) -> None:
    found = merge_system_messages(roles(given))
    assert [f"{one.role} {one.content}" for one in found] == [
        text.replace(" ", "\n\n").replace("\n\n", " ", 1) for text in merged
    ]


@pytest.mark.parametrize("number", range(1, 12))
def test_a_conversation_begins_like_its_earlier_turns(number: int) -> None:
    whole = merge_system_messages(roles("suasuasuatsa"))
    earlier = merge_system_messages(roles("suasuasuatsa"[:number]))
    # Only the last turn may still become longer.
    assert whole[: len(earlier) - 1] == earlier[:-1]


CONVERSATIONS: list[tuple[list[dict[str, Any]], str]] = [  # Any: JSON
    ([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}],
     "system=S;user=a\n\nb;"),
    ([{"role": "user", "content": "a"}, {"role": "system", "content": "b"},
      {"role": "user", "content": "c"}], "system=S;user=a\n\nb\n\nc;"),
    ([{"role": "user", "content": "a"}, {"role": "assistant", "content": [USE]},
      {"role": "user", "content": [{**RESULT, "content": "5"}]},
      {"role": "system", "content": [{"type": "text", "text": "b"}]}],
     "system=S;user=a;assistant=;tool=5\n\nb;"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "text"), CONVERSATIONS)
def test_a_template_that_rejects_them_gets_them_in_other_messages(
    server: Server, messages: list[dict[str, Any]], text: str
) -> None:
    server.engine.reset()
    body = {"model": "tiny", "max_tokens": 4, "system": "S", "messages": messages}
    assert posted(server, body).status_code == 200
    (request,) = server.engine.log.submitted
    assert server.tokenizer.decode(request.prompt_token_ids) == text
    del body["max_tokens"]
    counted = posted(server, body, "messages/count_tokens").json()
    assert counted == {"input_tokens": len(request.prompt_token_ids)}
