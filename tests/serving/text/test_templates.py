"""Chat templates: forms of content, templates of requests, and limits on time and memory."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from cluster.serving.text.chat_template import ChatTemplate
from cluster.serving.text.request_templates import RequestTemplates, TemplateProcess
from cluster.serving.text.template_arguments import ChatMessage, ChatPrompt, MessageToolCall
from cluster.serving.validator import Validator
from pagedray.errors import EngineError, InvalidRequestError, OverloadedError
from tests.serving.conftest import Server, engine_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

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


SOURCES = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content | trim }}{% endfor %}",
    "{%- macro turn(m) %}{% generation %}{{ m | tojson }}{% endgeneration %}{% endmacro -%}\n"
    "{% for m in messages %}{{ turn(m) }}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n ~ '|' ~ bos_token }}{{ messages[0]['content'][::-1] }}\u00e9\U0001f600",
)
MESSAGES = (ChatMessage("user", " hello "), ChatMessage("assistant", "x"))
MANY = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def templates() -> Iterator[RequestTemplates]:
    templates = RequestTemplates({"bos_token": "<s>"})
    yield templates
    templates.close()


async def rendered(templates: RequestTemplates, source: str, tenant: str = "ann") -> str:
    return await templates.run(source, tenant, lambda render: render(ChatPrompt(MESSAGES)))


class GatedProcess(TemplateProcess):
    """Returns the source of a template when its gate is open, and notes what it began."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.sources: list[str] = []

    def render(self, source: str, special_tokens: Mapping[str, str], prompt: ChatPrompt) -> str:
        self.sources.append(source)
        self.gate.wait()
        return source


@contextmanager
def few_files(num_more: int) -> Iterator[None]:
    """Let no more than this many files and sockets be opened."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + num_more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def num_open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


# A process needs two sockets, and further files until it has started.
@pytest.mark.parametrize("num_more", [0, 2])
def test_a_template_is_rendered_once_files_can_be_opened_again(num_more: int) -> None:
    process, num_attempts = TemplateProcess(), 10
    num_before = num_open_files()
    try:
        for _ in range(num_attempts):
            with few_files(num_more), pytest.raises(EngineError, match="Too many open files"):
                process.render("a", {}, ChatPrompt(()))
        # Threads that earlier tests have left may open or close some meanwhile.
        assert num_open_files() < num_before + num_attempts
        assert process.render("a", {}, ChatPrompt(())) == "a"
    finally:
        process.close()


@pytest.mark.parametrize("source", SOURCES)
async def test_templates_render_as_those_of_transformers(
    templates: RequestTemplates, source: str
) -> None:
    conversation = [{"role": one.role, "content": one.content} for one in MESSAGES]
    expected, _ = cast(
        "tuple[list[str], object]",
        render_jinja_template(
            [conversation], chat_template=source, bos_token="<s>", add_generation_prompt=True
        ),
    )
    assert [await rendered(templates, source)] == expected


@pytest.mark.parametrize(
    ("source", "text", "param"),
    [
        (
            "{% if %}",
            "The request has an invalid chat template: Expected an expression, got 'end of "
            "statement block'",
            "chat_template",
        ),
        (
            "{{" + "(" * 900 + "a" + ")" * 900 + "}}",
            "The request has an invalid chat template: maximum recursion depth exceeded",
            "chat_template",
        ),
        (
            "{{ raise_exception('no system message') }}",
            "The request's chat template rejected the messages: no system message.",
            "messages",
        ),
        (
            "{{ messages.__class__.__mro__ }}",
            "The request's chat template rejected the messages: access to attribute '__class__'",
            "messages",
        ),
        (
            "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}"
            "{% endfor %}",
            "The request's chat template exceeds a limit with these messages: out of memory.",
            "messages",
        ),
        (
            "{{ 'a' * 20000000 }}",
            "The request's chat template writes 20000000 characters; at most 16777216 are allowed.",
            "messages",
        ),
    ],
    ids=["syntax", "nesting", "rejected", "sandbox", "memory", "length"],
)
async def test_templates_are_rejected_by_reason(
    templates: RequestTemplates, source: str, text: str, param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await rendered(templates, source)
    assert str(caught.value).startswith(text)
    assert caught.value.param == param


@pytest.mark.parametrize("source", [MANY, "{{" + "a<" * 16_000 + "a}}"], ids=["run", "compile"])
async def test_templates_end_at_the_limit_of_cpu_time(source: str) -> None:
    templates = RequestTemplates({}, process=TemplateProcess(cpu_s=0.3, wait_s=120.0))
    with pytest.raises(InvalidRequestError, match=r"takes more than 0\.3 s of CPU time"):
        await rendered(templates, source)
    # The process remains.
    assert await rendered(templates, "a") == "a"
    templates.close()


async def test_a_busy_machine_is_no_fault_of_the_template() -> None:
    process = TemplateProcess(wait_s=0.01)
    templates = RequestTemplates({}, process=process)
    process.start_process()
    stopped = process.process_id
    assert stopped is not None
    # As if it did not get the CPU.
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(OverloadedError, match="could not be rendered in time"):
        await rendered(templates, "a")
    assert process.process_id is None
    templates.close()


async def test_process_is_started_again_after_it_died() -> None:
    process = TemplateProcess()
    templates = RequestTemplates({}, process=process)
    await rendered(templates, "a")
    assert process.process_id is not None
    os.kill(process.process_id, signal.SIGKILL)
    # It may die after the template was sent to it.
    try:
        text = await rendered(templates, "b")
    except EngineError:
        text = await rendered(templates, "b")
    assert text == "b"
    templates.close()


async def test_tenant_with_many_templates_is_rejected_and_others_are_not() -> None:
    process = GatedProcess()
    templates = RequestTemplates({}, process=process)
    calls = [asyncio.create_task(rendered(templates, str(n))) for n in range(16)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="16 chat templates of this tenant"):
        await rendered(templates, "x")
    other = asyncio.create_task(rendered(templates, "y", "ben"))
    while len(process.sources) < 2:
        await asyncio.sleep(0.001)
    # The other tenant's does not wait for any of these.
    assert set(process.sources) == {"0", "y"}
    process.gate.set()
    await asyncio.gather(other, *calls)
    templates.close()
