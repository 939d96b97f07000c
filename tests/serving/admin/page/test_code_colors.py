"""Colors of code on the page: which parts have one, and when."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.serving.admin.page.test_markdown import put

if TYPE_CHECKING:
    from tests.serving.admin.page.chat_page import ChatPage

COLORED = (
    "[...CSS.highlights].flatMap(([name, highlight]) => [...highlight].map((range) =>"
    " [name, range.startContainer.data.slice(range.startOffset, range.endOffset)]))"
)
CODE = """def half(x: int) -> float:  # TODO: one & two
    return x / 2 if x else "</span><b>&amp;"
"""
KINDS = [
    *(["code-keyword", word] for word in ("def", "return", "if", "else")),
    ["code-comment", "# TODO: one & two"],
    ["code-string", '"</span><b>&amp;"'],
    ["code-number", "2"],
    ["code-title", "half"],
    *(["code-name", word] for word in ("int", "float")),
]
APPEND = """
import('/page/markdown/markdown_view.js').then(({ MarkdownView }) => {
  window.view = new MarkdownView();
  document.getElementById('messages').replaceChildren(window.view.node);
  window.view.append(%s);
})
"""


def colored(page: ChatPage, least: int = 1) -> list[list[str]]:
    """Return the kinds and the texts of all colored parts, once there are enough."""
    page.wait_for(f"{COLORED}.length >= {least}")
    found: list[list[str]] = page.evaluate(COLORED)
    return found


def rest(page: ChatPage) -> None:
    """Let the worker answer, and the browser look at what is in view."""
    page.evaluate(
        "import('/page/markdown/code_colors.js').then(({ codeColors }) =>"
        " codeColors.color('', 'python', []))"
    )
    frames = "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(wake, 50)))"
    page.evaluate(f"new Promise((wake) => {frames})")


def fenced(code: str, language: str = "python") -> str:
    return json.dumps(f"```{language}\n{code}```\n")


def test_parts_of_code_have_the_color_of_their_kind(page: ChatPage) -> None:
    put(page, fenced(CODE))
    assert sorted(colored(page, len(KINDS))) == sorted(KINDS)
    # Colors add no elements, so that the text is that of the model.
    assert page.text("pre code") == CODE.rstrip("\n")
    assert page.count("pre code > *") == 1
    assert page.count("pre code > * > *") == 0
    assert page.console == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_kinds_have_styles_of_their_own(page: ChatPage, scheme: str) -> None:
    page.browser.look(width=1200, height=800, scheme=scheme)
    put(page, fenced(CODE))
    colored(page, len(KINDS))
    style = "getComputedStyle(document.querySelector('pre code'), '::highlight(%s)').color"
    colors = {page.evaluate(style % kind) for kind in {kind for kind, _ in KINDS}}
    assert len(colors) == 6
    page.browser.look(width=1200, height=800)


@pytest.mark.parametrize(
    "language",
    [
        "nothing",
        "__proto__",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("", "constructor", "plaintext")),
    ],
)
def test_code_of_no_known_language_has_no_colors(page: ChatPage, language: str) -> None:
    put(page, fenced(CODE, language))
    rest(page)
    assert page.evaluate(COLORED) == []
    assert page.console == []


def test_only_complete_blocks_have_colors(page: ChatPage) -> None:
    page.evaluate(APPEND % json.dumps(f"```python\n{CODE}"))
    page.wait_for("document.querySelector('pre code') !== null")
    rest(page)
    assert page.evaluate(COLORED) == []
    page.evaluate("window.view.append('```\\n\\none\\n\\ntwo\\n\\nthree\\n')")
    assert len(colored(page, len(KINDS))) == len(KINDS)
    page.evaluate("window.view.end()")
    rest(page)
    assert sorted(colored(page, len(KINDS))) == sorted(KINDS)
    page.evaluate("window.view.node.remove()")
    page.wait_for(f"{COLORED}.length === 0")


def test_code_inside_of_a_list_has_colors(page: ChatPage) -> None:
    put(page, json.dumps("- a\n\n  ```python\n  x = 1\n  ```\n"))
    assert colored(page) == [["code-number", "1"]]


def test_code_inside_of_a_string_is_no_string(page: ChatPage) -> None:
    put(page, fenced('f"a {b + 1} c"\n'))
    assert sorted(colored(page, 3)) == [
        ["code-number", "1"],
        ["code-string", ' c"'],
        ["code-string", 'f"a '],
    ]


def test_text_that_spans_many_lines_is_colored_in_all_of_them(page: ChatPage) -> None:
    # Lines are laid out in parts of 32.
    doc = '"""' + "".join(f"line {number}\n" for number in range(40)) + '"""'
    put(page, fenced(f"x = 1\n{doc}\n"))
    strings = [text for kind, text in colored(page, 3) if kind == "code-string"]
    assert "".join(strings) == doc


def test_long_code_is_colored_where_it_is_seen(page: ChatPage) -> None:
    put(page, fenced("x = 1\n" * 5000))
    assert 32 <= len(colored(page, 32)) < 200
    scroll = "const pre = document.querySelector('.code pre'); pre.scrollTop = pre.scrollHeight"
    page.evaluate(f"{{ {scroll} }}")
    last = "document.querySelector('pre code > :last-child').firstChild"
    shown = "[...CSS.highlights.get('code-number')].some((one) => one.startContainer === %s)"
    page.wait_for(shown % last)
    first = "document.querySelector('pre code > :first-child').firstChild"
    page.wait_for(f"!{shown % first}")


def test_colors_of_code_that_is_gone_are_freed(page: ChatPage) -> None:
    put(page, fenced(CODE))
    colored(page)
    page.evaluate("window.view.node.remove()")
    page.wait_for(f"{COLORED}.length === 0")


def test_code_that_takes_too_long_stays_in_one_color(page: ChatPage) -> None:
    page.load(keeps_limits=True)
    slow: Any = "'```python\\n' + 'x = foo(1, \"a\")\\n'.repeat(20_000) + '```\\n'"
    put(page, slow)
    rest(page)
    assert page.evaluate(COLORED) == []
    put(page, fenced(CODE))
    assert len(colored(page, len(KINDS))) == len(KINDS)
