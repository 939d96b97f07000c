"""Templates of requests are compiled in another process, once for each tenant."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from cluster.serving.text.templates.chat_prompt import ChatMessage, ChatPrompt
from cluster.serving.text.templates.compiler_client import TemplateCompilerClient
from cluster.serving.text.templates.request_templates import RequestTemplates
from cluster.serving.text.templates.template_code import TemplateCode, compile_template
from pagedray.errors import EngineError, InvalidRequestError, OverloadedError

if TYPE_CHECKING:
    from collections.abc import Iterator

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
