"""Chat templates of a model's folder, with a conversation and a tool."""

from __future__ import annotations

import json

from cluster.serving.text.templates.chat_prompt import ChatMessage, ChatPrompt, MessageToolCall
from cluster.serving.text.templates.chat_template import ChatTemplate
from pagedray.errors import CheckpointError, InvalidRequestError
from tests.hostile.fuzz.target import Target, check_message
from tests.system.server_process import TINY_LLAMA

_CPU_S = 0.2
_TINY: str = json.loads((TINY_LLAMA / "tokenizer_config.json").read_text())["chat_template"]
_CALL = MessageToolCall(id="c", name="look", arguments={"where": "x", "deep": [1, None]})
_MESSAGES = (
    ChatMessage(role="system", content="s"),
    ChatMessage(role="user", content="x <s> y"),
    ChatMessage(role="assistant", content="", tool_calls=(_CALL,), reasoning="t"),
    ChatMessage(role="tool", content="1", tool_call_id="c", name="look"),
)
_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def run(data: bytes) -> None:
    """Return a text, or a documented error; a rendering may take a fifth of a second."""
    try:
        source = data.decode()
    except UnicodeDecodeError:
        return
    try:
        template = ChatTemplate(source, {"bos_token": "<s>"}, origin="fuzz", cpu_s=_CPU_S)
    except CheckpointError as error:
        check_message(error)
        return
    try:
        text = template.render(ChatPrompt(_MESSAGES, (_TOOL,)))
    except InvalidRequestError as error:
        check_message(error)
        return
    assert isinstance(text, str)


_MACRO = (
    b"{%- macro one(m, n=2) %}{{ m.content | trim }}{% for i in range(n) %}.{% endfor %}"
    b"{% endmacro %}{% set ns = namespace(first=true) %}{% for m in messages %}"
    b"{% if ns.first %}{% set ns.first = false %}{{ bos_token }}{% endif %}"
    b"{{ one(m) if m.role != 'tool' else m | tojson(indent=2) }}"
    b"{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.arguments | items | list }}"
    b"{% endfor %}{% endif %}{% endfor %}"
)
_LOOPS = (
    b"{% for m in messages[1:] if m.content is string %}{{ loop.index0 * 3 ~ m['role'].upper() }}"
    b"{% if loop.last %}{% break %}{% endif %}{% else %}{{ raise_exception('none') }}{% endfor %}"
    b"{{ tools | map(attribute='function.name') | join(', ') }}{{ '%s' % 5 }}"
    b"{{ strftime_now('%Y') }}"
    b"{% generation %}{{ 'x' * 8 }}{% endgeneration %}{% if add_generation_prompt %}>{% endif %}"
)

TARGET = Target(
    run=run,
    seeds=(_TINY.encode(), _MACRO, _LOOPS),
    words=(
        *(
            b"{% for a in range(9999999) %}",
            b"{% endfor %}",
            b"*9999999",
            b"**9999",
            b"'%9999d' % 1",
        ),
        *(b"| center(9999)", b"| tojson", b"| sort", b"| batch(2)", b"| replace('', 'xx')", b"~"),
        *(b"{% set a = ", b"%}", b"{{", b"}}", b"| list", b"| sum", b".__class__", b"['__init__']"),
        *(
            b".format(",
            b"{% macro a() %}",
            b"{{ a() }}",
            b"{% endmacro %}",
            b"caller()",
            b"cycler(",
        ),
        *(b"joiner(", b"lipsum(", b"namespace(", b"| attr('", b"{% filter ", b"{% call ", b"loop("),
    ),
    max_bytes=1024,
)
