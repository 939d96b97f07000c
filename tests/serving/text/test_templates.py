"""Chat templates: forms of content, templates of requests, and limits on time and memory."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import signal
import threading
import tracemalloc
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils.chat_template_utils import render_jinja_template

from cluster.serving.text.templates.chat_prompt import ChatMessage, ChatPrompt, MessageToolCall
from cluster.serving.text.templates.chat_template import ChatTemplate
from cluster.serving.text.templates.compiler_client import TemplateCompilerClient
from cluster.serving.text.templates.format_limits import check_brace_format, check_percent_format
from cluster.serving.text.templates.rendering_budget import TemplateLimitError
from cluster.serving.text.templates.request_templates import RequestTemplates
from cluster.serving.text.templates.template_code import TemplateCode, compile_template
from cluster.serving.text.templates.template_limits import LimitedEnvironment
from cluster.serving.validation.validator import Validator
from pagedray.errors import CheckpointError, EngineError, InvalidRequestError, OverloadedError
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


SOURCES = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content | trim }}{% endfor %}",
    "{%- macro turn(m) %}{% generation %}{{ m | tojson }}{% endgeneration %}{% endmacro -%}\n"
    "{% for m in messages %}{{ turn(m) }}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n ~ '|' ~ bos_token }}{{ messages[0]['content'][::-1] }}\u00e9\U0001f600",
)
LONGEST = "{{" + "a<" * 16_000 + "a}}"
MESSAGES = (ChatMessage("user", " hello "), ChatMessage("assistant", "x"))


@pytest.fixture
def templates() -> Iterator[RequestTemplates]:
    templates = RequestTemplates({"bos_token": "<s>"})
    yield templates
    templates.close()


class GatedCompiler(TemplateCompilerClient):
    """Compiles in place when its gate is open, and notes what it began."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.sources: list[str] = []

    def compile_template(self, source: str) -> TemplateCode:
        self.sources.append(source)
        self.gate.wait()
        return compile_template(source)


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
def test_a_template_is_compiled_once_files_can_be_opened_again(num_more: int) -> None:
    client, num_attempts = TemplateCompilerClient(), 10
    num_before = num_open_files()
    try:
        for _ in range(num_attempts):
            with few_files(num_more), pytest.raises(EngineError, match="Too many open files"):
                client.compile_template(SOURCES[0])
        # Threads that earlier tests have left may open or close some meanwhile.
        assert num_open_files() < num_before + num_attempts
        assert client.compile_template(SOURCES[0]).variables == {"messages"}
    finally:
        client.close()


@pytest.mark.parametrize("source", SOURCES)
async def test_templates_render_as_those_of_transformers(
    templates: RequestTemplates, source: str
) -> None:
    template = await templates.template_of(source, "ann")
    conversation = [{"role": one.role, "content": one.content} for one in MESSAGES]
    expected, _ = cast(
        "tuple[list[str], object]",
        render_jinja_template(
            [conversation], chat_template=source, bos_token="<s>", add_generation_prompt=True
        ),
    )
    assert [template.render(ChatPrompt(MESSAGES))] == expected


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% if %}", "Expected an expression, got 'end of statement block'"),
        ("{{" + "(" * 900 + "a" + ")" * 900 + "}}", "maximum recursion depth exceeded"),
    ],
    ids=["syntax", "nesting"],
)
async def test_invalid_templates_are_rejected_by_reason(
    templates: RequestTemplates, source: str, reason: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await templates.template_of(source, "ann")
    assert str(caught.value).startswith(f"The request has an invalid chat template: {reason}")
    assert caught.value.param == "chat_template"


async def test_compilation_ends_at_its_limit_of_cpu_time() -> None:
    templates = RequestTemplates({}, compiler=TemplateCompilerClient(compile_s=0.4, wait_s=120.0))
    with pytest.raises(InvalidRequestError, match=r"takes more than 0\.4 s of CPU time"):
        await templates.template_of(LONGEST, "ann")
    # The process remains.
    template = await templates.template_of("a", "ann")
    assert template.render(ChatPrompt(())) == "a"
    templates.close()


async def test_a_busy_machine_is_no_fault_of_the_template() -> None:
    compiler = TemplateCompilerClient(wait_s=0.01)
    templates = RequestTemplates({}, compiler=compiler)
    compiler.start_process()
    stopped = compiler.process_id
    assert stopped is not None
    # As if it did not get the CPU.
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(OverloadedError, match="could not be compiled in time"):
        await templates.template_of("a", "ann")
    assert compiler.process_id is None
    templates.close()


async def test_process_is_started_again_after_it_died() -> None:
    compiler = TemplateCompilerClient()
    templates = RequestTemplates({}, compiler=compiler)
    await templates.template_of("a", "ann")
    assert compiler.process_id is not None
    os.kill(compiler.process_id, signal.SIGKILL)
    # It may die after the template was sent to it.
    try:
        template = await templates.template_of("b", "ann")
    except EngineError:
        template = await templates.template_of("b", "ann")
    assert template.render(ChatPrompt(())) == "b"
    templates.close()


async def test_event_loop_goes_on_while_a_template_is_compiled_once() -> None:
    compiler = GatedCompiler()
    templates = RequestTemplates({}, compiler=compiler)
    calls = [asyncio.create_task(templates.template_of("a", "ann")) for _ in range(3)]
    other = asyncio.create_task(templates.template_of("a", "ben"))
    await asyncio.sleep(0)
    calls[0].cancel()
    compiler.gate.set()
    first, second = await asyncio.gather(*calls[1:])
    assert first is second
    # Another tenant's is its own.
    assert await other is not first
    assert await templates.template_of("a", "ann") is first
    assert compiler.sources == ["a", "a"]
    templates.close()


async def test_an_invalid_template_of_a_cancelled_call_logs_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiler = GatedCompiler()
    templates = RequestTemplates({}, compiler=compiler)
    cancelled, waiting = (asyncio.create_task(templates.template_of("{{", "ann")) for _ in range(2))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    compiler.gate.set()
    with pytest.raises(InvalidRequestError):
        await waiting
    assert cancelled.cancelled()
    templates.close()
    assert caplog.records == []


async def test_tenant_with_many_templates_is_rejected_and_others_are_not() -> None:
    compiler = GatedCompiler()
    templates = RequestTemplates({}, compiler=compiler)
    calls = [asyncio.create_task(templates.template_of(str(n), "ann")) for n in range(16)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="16 chat templates of this tenant"):
        await templates.template_of("x", "ann")
    other = asyncio.create_task(templates.template_of("y", "ben"))
    while len(compiler.sources) < 2:
        await asyncio.sleep(0.001)
    # The other tenant's does not wait for any of these.
    assert set(compiler.sources) == {"0", "y"}
    compiler.gate.set()
    await asyncio.gather(other, *calls)
    templates.close()


RANGE = "range(99999)"
GROWING = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = %s %}{% endfor %}"
LIST = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = %s %}{% endfor %}"
PAIR = (
    "{% set ns = namespace(x=1, y=1) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}"
)


LIMITS = (
    "takes more than|too much|too large|too often|too many|too long|must not exceed|not supported|"
    "must be a number|recursion"
)


@pytest.mark.parametrize(
    "source",
    [
        f"{{% for a in {RANGE} %}}{{% for b in {RANGE} %}}{{% endfor %}}{{% endfor %}}",
        f"{{% for a in {RANGE} %}}{{% for b in {RANGE} if b == 1 %}}x{{% endfor %}}{{% endfor %}}",
        "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
        "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(99) }}",
        "{% for a in [1] recursive %}{{ loop([1, 2]) }}{% endfor %}",
        f"{{{{ {RANGE} | map('string') | map('length') | sum + ({RANGE} | list | length) }}}}"
        * 200,
        f"{{% for a in {RANGE} %}}{{{{ {RANGE} | map('string') | list | length }}}}{{% endfor %}}",
        GROWING.replace("%s", "ns.x ~ ns.x"),
        GROWING.replace("%s", "ns.x + ns.x"),
        GROWING.replace("%s", "ns.x * 9"),
        GROWING.replace("%s", "ns.x | replace('a', 'aa')"),
        GROWING.replace("%s", "ns.x.replace('a', 'aa')"),
        GROWING.replace("%s", "[ns.x, ns.x] | join"),
        GROWING.replace("%s", "''.join([ns.x, ns.x])"),
        GROWING.replace("%s", "'%s%s' % (ns.x, ns.x)"),
        GROWING.replace("%s", "'%s%s' | format(ns.x, ns.x)"),
        GROWING.replace("%s", "'{0}{0}'.format(ns.x)"),
        GROWING.replace(
            "{% set ns.x = %s %}", "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}"
        ),
        LIST.replace("%s", "ns.x + ns.x"),
        LIST.replace("%s", "[ns.x, ns.x]"),
        LIST.replace("%s", "(ns.x, ns.x)"),
        LIST.replace("%s", "{1: ns.x, 2: ns.x}"),
        LIST.replace("%s", "dict(a=ns.x, b=ns.x)"),
        LIST.replace("%s", "ns.x * 2"),
        PAIR,
        "{{ [['a' * 99999] * 99999] | string }}",
        "{{ {'a': ('b' * 99999,) * 99999} | tojson }}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ [1] * 99999 * 99999 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ 7 ** 99999 }}",
        "{{ 'x' | indent(10 ** 4 * 10 ** 6) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 9999999999) }}",
        "{{ '%(a(b))9999999999d' % {'a(b)': 1} }}",
        "{{ '%.9999999999f' % 1 }}",
        "{{ ('{0}' * 60000).format('') }}",
        "{{ 'a'.ljust(9999999999) }}",
        "{{ 'a'.center(9999999999) }}",
        "{{ 'a'.zfill(9999999999) }}",
        "{{ (1).to_bytes(9999999999, 'big') }}",
        "{{ 1.5 | round(999999999, 'ceil') }}",
        "{{ messages | tojson(indent=999999999) }}",
        "{{ ('a' * 9999) | replace('', 'b' * 99999) }}",
        "{{ [[1]] | sum(start=[]) }}",
        "{{ [[1]] | sum(none, []) }}",
        "{{ ('f' * 99999) | int(0, 16) // 7 }}",
        "{{ messages | tojson(separators=(',' * 99999, ':')) }}",
    ],
)
def test_a_template_cannot_run_for_ever(source: str) -> None:
    with pytest.raises((InvalidRequestError, CheckpointError), match=LIMITS):
        ChatTemplate(source, {}, origin="here", cpu_s=0.1).render(
            ChatPrompt((ChatMessage("user", "x"),))
        )


BIG = "{% set big = 'x' * 262144 %}{% set ns = namespace(a=[big]) %}"
WORDS = (
    "{% set ns = namespace(a='x ' * 131072) %}"
    "{% for i in range(6) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}"
)


# Each would make a text of almost 300 million characters at once.
@pytest.mark.parametrize(
    "source",
    [
        "{{ ('%(a)s' * 1100) % {'a': big} }}",
        "{{ ('%(a)s' * 1100) % {'a': [big]} }}",
        "{{ ('%(a)s' * 1100) | format(a=big) }}",
        "{{ ('{a}' * 1100).format(a=[big]) }}",
        "{{ ('{a}' * 1100).format_map({'a': big}) }}",
        "{{ ('{0[a]}' * 1100).format({'a': big}) }}",
        "{% for one in [big, 1] %}{{ ('{0.previtem}' * 1100).format(loop) }}{% endfor %}",
        "{{ 'x'.encode() * 300000000 }}",
        "{{ [ns] * 1100 }}",
        "{{ ([ns] * 1100) | string }}",
        "{{ ([ns] * 1100) | upper }}",
        "{{ 'a' | replace('a', [ns] * 1100) }}",
        "{{ ([ns] * 1100) | map(attribute='a') | join }}",
        "{{ [{'a': big}.items()] * 1100 }}",
        "{{ [{'a': big}.values()] * 1100 ~ 'x' }}",
        "{{ [10 ** 4000] * 75000 }}",
        "{{ '{:\uff19\uff19\uff19\uff19\uff19\uff19\uff19\uff19}'.format(1) }}",
        "{{ ('%(a)999d' * 32000) % {'a': 1} }}",
        WORDS + "{{ ns.a.split() }}",
        WORDS + "{{ ns.a.split('x') }}",
        WORDS + "{{ ns.a.splitlines() }}",
        WORDS + "{{ ns.a | list }}",
        WORDS + "{{ ns.a | sort }}",
        WORDS + "{{ ns.a | wordcount }}",
        WORDS + "{{ ns.a | title }}",
        WORDS + "{{ ns.a | join('') }}",
        WORDS + "{{ raise_exception(ns.a) }}",
    ],
)
def test_a_rejected_operation_takes_no_memory(source: str) -> None:
    template = ChatTemplate(BIG + source, {}, origin="here")
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError):
            template.render(ChatPrompt((ChatMessage("user", "x"),)))
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()


def test_parts_of_texts_are_counted() -> None:
    macro = "{% macro m(n, s) %}{% if n %}{{ m(n - 1, s[1:]) }}{% endif %}{% endmacro %}"
    template = ChatTemplate(macro + WORDS + "{{ m(20, ns.a) }}", {}, origin="here")
    with pytest.raises(InvalidRequestError, match="too much text"):
        template.render(ChatPrompt((ChatMessage("user", "x"),)))


@pytest.mark.parametrize(
    "name", ["lipsum(99)", "'a' | center(9)", "'a' | pprint", "[1] | slice(9)"]
)
def test_what_no_prompt_needs_is_not_there(name: str) -> None:
    with pytest.raises((InvalidRequestError, CheckpointError)):
        ChatTemplate(f"{{{{ {name} }}}}", {}, origin="here").render(ChatPrompt(()))


USUAL = (
    "{%- set ns = namespace(found=false, text='') -%}"
    "{%- for m in messages if m.role != 'system' -%}"
    "{%- if loop.first and m.role == 'user' -%}{%- set ns.found = true -%}{%- endif -%}"
    "{%- set ns.text = ns.text + '\n' + m['content'] | trim -%}"
    "{{- '%s:%d' % (m.role, loop.index) }} {{ '<' ~ m.content.split('a')[-1].upper() ~ '>' -}}"
    "{%- endfor -%}"
    "{{ ns.found }} {{ ns.text }} {{ messages | map(attribute='role') | join(',') }}"
    "{{ '-'.join(messages | map(attribute='content')) }}{{ messages | selectattr('role') | list }}"
    "{{ {'a': [1, (2, 3)]} | tojson(indent=2) }}{{ messages[::-1][0].content * 2 }}"
    "{{ '{:02d}'.format(7) }} {{ 2 ** 10 }} {{ 'a\nb' | indent(4) }} {{ 2.55 | round(1) }}"
    "{% macro m(n) %}{% if n %}{{ n }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(3) }}"
    "{% set block %}{{ messages | length }}{% endset %}{{ block }}"
    "{% for k, v in {'x': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ [1, 2] | sum }}"
    "{{ 'Today: 2026-01-31\n**%s** 100%% %(5)s' | replace('%(5)s', '') | format('x') }}"
    '{{ \'{{"name": "{}", "a.b": [2026]}} {form} {values}\'.format(\'x\', form=1, values=2) }}'
    "{{ '%(form)s %(values)05.1f' | format(form='x', values=2) }}{{ '%s' % [1, 2] }}"
    "{{ 'a.b.c' | replace('.', '-', count=1) }}{{ 'f0' | int(0, 16) }}{{ [1, 2] | sum(start=3) }}"
    "{{ messages[1:] | length }}{{ messages[0].content[:1] }}{{ ['b', 'a'] | sort }}"
)


def test_limits_change_no_text() -> None:
    messages = [ChatMessage("system", "s"), ChatMessage("user", "hat"), ChatMessage("tool", "b")]
    plain = [{"role": one.role, "content": one.content} for one in messages]
    expected = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    expected.filters["tojson"] = lambda value, indent=None: json.dumps(value, indent=indent)
    assert ChatTemplate(USUAL, {}, origin="here").render(ChatPrompt(tuple(messages))) == (
        expected.from_string(USUAL).render(messages=plain)
    )


def test_time_is_counted_for_each_rendering() -> None:
    environment = LimitedEnvironment(cpu_s=0.05)
    template = environment.from_string("{% for i in range(20000) %}{{ i }}{% endfor %}")
    for _ in range(20):
        environment.start_rendering()
        assert template.render()


def test_long_conversations_are_rendered() -> None:
    messages = tuple(ChatMessage("user", "word " * 200) for _ in range(4000))
    template = ChatTemplate(USUAL.replace("{%- set ns.text", "{%- set x"), {}, origin="x")
    assert len(template.render(ChatPrompt(messages))) > 4_000_000


def test_compiling_keeps_no_large_text_of_constants() -> None:
    # jinja computes filters of constants in advance.
    source = f"{{{{ 'aaaa' | replace('a', '{'b' * 30_000}') | replace('b', '{'c' * 100}') }}}}"
    template = ChatTemplate(source, {}, origin="here")
    kept = template._template.root_render_func.__code__.co_consts
    assert max(len(one) for one in kept if isinstance(one, str)) < 2**18
    assert len(template.render(ChatPrompt(()))) == 4 * 30_000 * 100


LARGEST_FIELD = 999 + 999 + 310
"""A number such as 1e308 with the largest width and precision."""
FORMS = st.text("%(a)*-+ #.0123456789hldsfx{}:!r<>\uff11\uff12\uff19\u0661", max_size=24)
LITERALS = st.text("a*0123456789.[]()# \n", max_size=12)


def is_accepted(form: str, *, is_brace: bool) -> bool:
    try:
        if is_brace:
            check_brace_format(form, ("x", 1.5))
        else:
            check_percent_format(form, {"a": 1, "": 1})
    except TemplateLimitError:
        return False
    return True


@given(FORMS)
@example("%0099999d")
@example("%(a)-+ #099999.5d")
@example("%.99999hd")
@example("%%%99999d")
def test_an_accepted_percent_format_makes_no_large_text(form: str) -> None:
    if is_accepted(form, is_brace=False):
        for value in (1, "x"):
            with suppress(ValueError, TypeError, KeyError, OverflowError):
                assert len(form % {"a": value, "": value}) <= len(form) * LARGEST_FIELD


@given(FORMS)
@example("{0:99999}")
@example("{a!r:>\uff11\uff12\uff19\u0661\u0661\u0661}")
@example("{0:{0}}")
def test_an_accepted_brace_format_makes_no_large_text(form: str) -> None:
    with suppress(ValueError):
        if is_accepted(form, is_brace=True):
            with suppress(TypeError, KeyError, IndexError, OverflowError):
                assert len(form.format(99, "x", a=1.5)) <= len(form) * LARGEST_FIELD


@given(st.lists(LITERALS, min_size=1), st.sampled_from(["%s", "%(a)s", "%5d", "%-3s", "%%"]))
def test_text_beside_percent_fields_does_not_matter(texts: list[str], field: str) -> None:
    assert is_accepted(field.join(texts), is_brace=False)


@given(
    st.lists(LITERALS, min_size=1), st.sampled_from(["{}", "{0}", "{a}", "{:>5}", "{{", "}}{{a.b"])
)
def test_text_beside_brace_fields_does_not_matter(texts: list[str], field: str) -> None:
    assert is_accepted(field.join(texts), is_brace=True)
