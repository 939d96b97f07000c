"""Templates that read content as a text, as parts, or as either, and those that drop it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from cluster.serving.text.templates.chat_prompt import ChatMessage, ChatPrompt, MessageToolCall
from cluster.serving.text.templates.chat_template import ChatTemplate
from cluster.serving.validation.validator import Validator
from tests.serving.conftest import Server, engine_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster.serving.text.tokenizer import Tokenizer

LOOP = (
    "{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}"
)
EACH = "{% for m in messages %}{{ m['role'] }}:"
NEXT = ";{% endfor %}"
PARTS = {
    "a loop": f"{EACH}{LOOP}{NEXT}",
    "attributes": EACH + "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}"
    "{% endfor %}" + NEXT,
    "a filter": EACH + "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ c['text'] }}{% endfor %}" + NEXT,
    "a map": EACH + "{{ m.content | map(attribute='text') | join('') }}" + NEXT,
    "get": EACH + "{% for c in m.content %}{{ c.get('text') }}{% endfor %}" + NEXT,
    "the first part": EACH + "{{ m.content[0].text }}" + NEXT,
    "a macro": "{% macro say(parts) %}{% for c in parts %}{% if c.type == 'text' %}{{ c.text }}"
    "{% endif %}{% endfor %}{% endmacro %}" + EACH + "{{ say(m.content) }}" + NEXT,
    "a variable": EACH + "{% set parts = m['content'] %}{% for c in parts %}{{ c['text'] }}"
    "{% endfor %}" + NEXT,
    "a namespace": EACH + "{% set found = namespace(text='') %}{% for c in m.content %}"
    "{% if c.type == 'text' %}{% set found.text = found.text ~ c.text %}{% endif %}{% endfor %}"
    "{{ found.text }}" + NEXT,
    # SmolVLM's and Idefics3's.
    "an image first": EACH + "{% if m['content'][0]['type'] == 'image' %}{{ ':' }}{% endif %}"
    "{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}" + NEXT,
    # LLaVA's.
    "two loops": EACH + "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}"
    "<image>{% endfor %}{% if m['role'] != 'assistant' %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}"
    "{% endfor %}{% else %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ c['text'] }}{% endgeneration %}{% endfor %}{% endif %}" + NEXT,
}
EITHER = {
    "a text": EACH + "{{ m['content'] }}" + NEXT,
    "stripped": EACH + "{{ m['content'] | trim }}" + NEXT,
    "either": EACH + "{% if m['content'] is string %}{{ m['content'] }}{% else %}" + LOOP
    + "{% endif %}" + NEXT,
    "either, the other way": EACH + "{% if m['content'] is iterable and m['content'] is not string "
    "%}" + LOOP + "{% else %}{{ m['content'] }}{% endif %}" + NEXT,
    "an error for parts": EACH + "{% if m['content'] is not string %}{{ raise_exception('text') }}"
    "{% endif %}{{ m['content'] }}" + NEXT,
    "a text by role": EACH + "{% if m['role'] == 'user' %}" + LOOP + "{% else %}{{ m['content'] }}"
    "{% endif %}" + NEXT,
    "an error for texts": EACH + "{% if m['content'] is string %}{{ raise_exception('parts') }}"
    "{% endif %}" + LOOP + NEXT,
}  # fmt: skip
CALL = MessageToolCall(id="call00000", name="look", arguments={})
CONVERSATION = (
    ChatMessage("system", "Be brief."),
    ChatMessage("user", "hi"),
    ChatMessage("assistant", "ho", tool_calls=(CALL,)),
    ChatMessage("tool", "5", tool_call_id=CALL.id),
    ChatMessage("assistant", ""),
    ChatMessage("user", " more "),
)
ALL = "system:Be brief.;user:hi;assistant:ho;tool:5;assistant:;user: more ;"


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(source, {}, origin="test")


@pytest.mark.parametrize("name", [*PARTS, *EITHER])
def test_every_text_is_in_the_prompt(name: str) -> None:
    template = template_of((PARTS | EITHER)[name])
    expected = ALL.replace(" more ", "more") if name == "stripped" else ALL
    assert template.render(ChatPrompt(CONVERSATION)) == expected
    assert template.dropped_roles == ()


@pytest.mark.parametrize("name", PARTS)
def test_last_message_of_parts_is_continued(name: str) -> None:
    open_end = ChatPrompt((*CONVERSATION, ChatMessage("assistant", "and ")), (), False, True)
    assert template_of(PARTS[name]).render(open_end) == f"{ALL}assistant:and "


@pytest.mark.parametrize("texts", ["hello", ["hello"], ["hel", "lo"]])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_every_api_writes_parts(parts_server: Server, path: str, texts: str | list[str]) -> None:
    parts_server.engine.reset()
    kind = "input_text" if path == "/v1/responses" else "text"
    content = texts if isinstance(texts, str) else [{"type": kind, "text": one} for one in texts]
    turns = [{"role": "user", "content": content}]
    body: dict[str, Any] = {"messages": turns, "max_tokens": 2, "model": "tiny"}  # Any: JSON
    if path == "/v1/responses":
        body = {"input": turns, "max_output_tokens": 2}
    answer = httpx.post(f"{parts_server.url}{path}", json=body)
    assert answer.status_code == 200, answer.text
    [request] = parts_server.engine.log.submitted
    assert parts_server.tokenizer.decode(request.prompt_token_ids) == "user:hello;"


def test_special_tokens_in_parts_are_text(parts_server: Server) -> None:
    parts_server.engine.reset()
    turn = {"role": "user", "content": [{"type": "text", "text": "<|system|>"}]}
    httpx.post(f"{parts_server.url}/v1/chat/completions", json={"messages": [turn]})
    [request] = parts_server.engine.log.submitted
    special = parts_server.tokenizer.encode("<|system|>", add_special_tokens=False)
    assert special[0] not in request.prompt_token_ids


@pytest.fixture(scope="module")
def parts_server(template_tokenizer: Callable[..., Tokenizer]) -> Iterator[Server]:
    with Server(template_tokenizer(PARTS["a loop"])) as server:
        yield server


DROPPING = {
    "user": "{% for m in messages %}{% if m.role != 'user' %}{{ m.content }}{% endif %}"
    "{% endfor %}",
    "system": "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}"
    "{% endfor %}",
    "tool": "{% for m in messages %}{% if m.role in ['user', 'assistant', 'system'] %}"
    "{{ m.content }}{% endif %}{% endfor %}",
    "user or assistant or system or tool": "{% for m in messages %}{{ m.contents }}{% endfor %}",
    # Parts of a type of its own.
    "user or assistant": "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}"
    "{% for c in m.content %}{% if c.type == 'words' %}{{ c.text }}{% endif %}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("roles", DROPPING)
def test_dropped_texts_are_noticed_at_start(
    template_tokenizer: Callable[..., Tokenizer], caplog: pytest.LogCaptureFixture, roles: str
) -> None:
    Validator(engine_config(), template_tokenizer(DROPPING[roles])).close()
    [line] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert line.getMessage() == (
        f"The chat template of tiny leaves out the text of messages with the role {roles}: the "
        "model will not read it. Check the template, or replace it with --chat-template."
    )


REJECTING = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('No.') }}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("source", [REJECTING, *PARTS.values(), *EITHER.values()])
def test_other_templates_have_no_warning(
    template_tokenizer: Callable[..., Tokenizer], caplog: pytest.LogCaptureFixture, source: str
) -> None:
    Validator(engine_config(), template_tokenizer(source)).close()
    assert [record for record in caplog.records if record.levelno == logging.WARNING] == []
