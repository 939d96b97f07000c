"""A chat template that never ends, or fills the memory, ends with an error."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.serving.text.templates.chat_prompt import ChatMessage, ChatPrompt
from cluster.serving.text.templates.chat_template import ChatTemplate
from cluster.serving.text.templates.template_limits import LimitedEnvironment
from pagedray.errors import CheckpointError, InvalidRequestError

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
