"""Markdown on the page, of models that mean well and of hostile ones, and colors of code."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.slow_params import some_slow

if TYPE_CHECKING:
    from tests.serving.admin.page.chat_page import ChatPage
    from tests.serving.fake_engine import FakeEngine

ATTACK = "<img src=x onerror=document.title=1>"
TEXT = """# Title

A **bold** and *slanted* `code` [link](https://example.com "t") &amp; more.

1. one
   - inner
2. two

- [x] done

> quote

| a | b |
|---|--:|
| 1 | 2 |

```python
x = 1
```

Energy is $E = mc^2$:

$$
x^2\\,dx
- y
$$

---
"""
PUT = """
import('/page/markdown/markdown_view.js').then(async ({ MarkdownView }) => {
  const view = new MarkdownView();
  document.getElementById('messages').append(view.node);
  window.view = view;
  for (const piece of %s) view.append(piece);
  await view.end();
  window.isDrawn = true;
})
"""

GROW = """
import('/page/markdown/markdown_view.js').then(async ({ MarkdownView }) => {
  const view = new MarkdownView();
  document.getElementById('messages').append(view.node);
  window.view = view;
  const text = %s;
  const size = Math.ceil(text.length / 5);
  for (let at = 0; at < text.length; at += size) {
    view.append(text.slice(at, at + size));
    do {
      await new Promise((wake) => setTimeout(wake, 60));
    } while (!view.node.hasChildNodes());
    window.first ??= view.node.querySelector('li, tbody tr');
  }
  await view.end();
  window.isDrawn = true;
})
"""


def put(page: ChatPage, text: str) -> None:
    """Draw a text on the page, without a model."""
    page.evaluate("window.isDrawn = false")
    page.evaluate(PUT % f"[{text}]")
    page.wait_for("window.isDrawn")


def grow(page: ChatPage, text: str) -> None:
    """Draw a text in some steps."""
    page.evaluate("window.isDrawn = false; window.first = null")
    page.evaluate(GROW % text)
    page.wait_for("window.isDrawn")


def test_markdown_is_drawn(page: ChatPage) -> None:
    page.speak(TEXT)
    page.ask("hello")
    for selector, text in {
        "h3": "Title",
        "strong": "bold",
        "em": "slanted",
        "p code": "code",
        "ol > li:nth-child(2)": "two",
        "ol ul li": "inner",
        ".task": "done",
        "blockquote p": "quote",
        "th": "a",
        "td:nth-child(2)": "2",
        "figure figcaption span": "python",
        "pre code": "x = 1",
    }.items():
        assert page.text(f".markdown {selector}").strip() == text, selector
    assert page.text(".markdown p").endswith("& more.")
    assert page.count(".markdown hr") == 1
    assert page.evaluate("document.querySelector('.markdown a').href") == "https://example.com/"
    assert page.console == []


@pytest.mark.slow
def test_code_has_a_button_that_copies_it(page: ChatPage) -> None:
    page.speak("a\n\n```\nx = 1\n```\n")
    page.ask("hello")
    # The page may not write to the clipboard of the machine that tests it.
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.click(".code .copy")
    page.wait_for("document.querySelector('.code .copy').textContent === 'Copied'")
    assert page.evaluate("window.copied") == "x = 1"
    page.click(".message.assistant > .actions .copy")
    page.wait_for("window.copied.includes('```')")


@pytest.mark.parametrize("size", some_slow([1, 3, 50], slow=[1, 50]))
def test_text_that_grows_ends_as_the_whole_text_does(page: ChatPage, size: int) -> None:
    pieces = f"{TEXT * 3!r}.match(/[^]{{1,{size}}}/g)".replace("\\n", "\\n")
    put(page, f"...{pieces}")
    grown = page.evaluate("window.view.node.innerHTML")
    put(page, f"{TEXT * 3!r}")
    assert grown == page.evaluate("window.view.node.innerHTML")


@pytest.mark.slow
def test_the_halves_of_a_line_break_are_one(page: ChatPage) -> None:
    put(page, r"'```\r', '\na\r', '\nb\r\n```'")
    assert page.evaluate("window.view.text") == "```\na\nb\n```"
    assert page.text("pre code") == "a\nb"


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "'- a **b**\\n'.repeat(1500)",
        "'3. a\\n\\n4. b\\n   - c\\n'.repeat(3)",
        "'- a\\n'.repeat(5) + '\\n- b\\n'",
        "'|a|b|\\n|-|:-:|\\n' + '|c|`d`|\\n'.repeat(50)",
        "'|a|b|\\n|-|-|\\n' + '|c|d|\\n'.repeat(1500)",
        "'- [a]\\n- b\\n- c\\n\\n[a]: https://example.com'",
        "'```\\n' + 'a\\n\\n b\\n'.repeat(50) + '```'",
        "'```\\n' + 'a\\n'.repeat(20_000)",
    ],
)
def test_long_blocks_grow_as_the_whole_text(page: ChatPage, text: str) -> None:
    grow(page, text)
    grown = page.evaluate("window.view.node.innerHTML")
    put(page, text)
    assert grown == page.evaluate("window.view.node.innerHTML")


@pytest.mark.slow
@pytest.mark.parametrize("text", ["'- a\\n'.repeat(40)", "'|a|\\n|-|\\n' + '|b|\\n'.repeat(40)"])
def test_what_is_drawn_of_a_list_or_table_is_kept(page: ChatPage, text: str) -> None:
    grow(page, text)
    assert page.count(".markdown li") + page.count(".markdown tbody tr") == 40
    assert page.evaluate("window.first.isConnected")


@pytest.mark.parametrize(
    "num_lines", some_slow([1, 32, 33, 100, 20_000], slow=[1, 32, 100, 20_000])
)
def test_code_of_many_lines_is_that_of_the_model(page: ChatPage, num_lines: int) -> None:
    code = (
        f"Array.from({{length: {num_lines}}}, (_, i) => i % 7 === 5 ? '' : '  a' + i).join('\\n')"
    )
    put(page, f"'```\\n' + {code} + '\\n```'")
    assert page.evaluate(f"document.querySelector('pre code').textContent === {code}")
    # A browser lays out the last part of a block that grows.
    assert page.evaluate("document.querySelectorAll('pre code > *').length") == min(
        500, -(-num_lines // 32)
    )
    # What the user selects has no other lines.
    select = "getSelection().selectAllChildren(document.querySelector('pre code'))"
    page.evaluate(select)
    assert page.evaluate(f"getSelection().toString().trimEnd() === ({code}).trimEnd()")
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.click(".code .copy")
    page.wait_for(f"window.copied === {code}")


@pytest.mark.slow
def test_open_code_block_grows_in_place(page: ChatPage, engine: FakeEngine) -> None:
    engine.step_s = 0.02
    page.speak("```python\n" + "x = 1\n" * 40)
    page.say("hello")
    page.wait_for("document.querySelector('.code pre')?.textContent.length > 20")
    page.evaluate("document.querySelector('.code').id = 'first'")
    page.wait_for("document.querySelector('.code pre').textContent.length > 60")
    assert page.count("#first") == 1
    page.browser.press("Escape")
    page.wait_for("!document.getElementById('send').hidden")


def test_html_of_models_and_users_stays_text(page: ChatPage) -> None:
    script = "<script>document.title = 1</script>"
    text = (
        f"{ATTACK}\n\n```\n{ATTACK}\n```\n\n`{ATTACK}` a {ATTACK}\n\n{script}\n\n|{ATTACK}|\n|-|\n"
    )
    page.speak(text)
    page.ask(ATTACK)
    assert page.evaluate("document.querySelectorAll('.messages :is(img, script)').length") == 0
    assert page.text("#messages").count("<img src=x") == 6
    assert "<script>document.title" in page.text("#messages")
    assert page.text("pre code") == ATTACK
    assert page.evaluate("document.title") == "tiny - PagedRay"
    assert page.console == []


def test_links_of_models_lead_to_other_sites_only(page: ChatPage) -> None:
    urls = (
        "javascript:alert(1)",
        "JaVaScRiPt:alert(1)",
        "&#106;avascript:alert(1)",
        "java\tscript:alert(1)",
        "data:text/html,<script>1</script>",
        "vbscript:x",
        "file:///etc/passwd",
        "/v1/models",
        "//evil.example",
    )
    put(page, json.dumps("\n\n".join(f"[a]({url}) ![b]({url}) <{url}>" for url in urls)))
    assert page.count(".markdown p") == len(urls)
    assert page.count(".markdown a") == 0
    assert page.count(".markdown img") == 0
    assert page.console == []


def test_images_of_models_are_links_that_the_user_may_follow(page: ChatPage) -> None:
    page.speak("![secret](https://evil.example/?q=1)")
    page.ask("hello")
    assert page.text(".markdown a") == "Image: secret"
    rel = page.evaluate("document.querySelector('.markdown a').rel")
    assert {"noopener", "noreferrer"} <= set(rel.split())
    assert page.console == []


@pytest.mark.parametrize(
    "text",
    [
        "'[' .repeat(50_000)",
        *(
            pytest.param(text, marks=pytest.mark.slow)
            for text in (
                "'|a'.repeat(5_000) + '\\n' + '|-'.repeat(5_000) + '\\n' + '|b'.repeat(5_000)",
                "'$' + '{'.repeat(20_000) + 'a' + '}'.repeat(20_000) + '$'",
                "'>' .repeat(20_000) + 'a'",
                "'- '.repeat(5_000) + 'a'",
                "'*a'.repeat(50_000)",
                "'_a_ '.repeat(50_000)",
                "'|a|\\n|-|\\n' + '|b|\\n'.repeat(20_000)",
                "'- a\\n'.repeat(20_000)",
                "'```'.repeat(3_001) + '\\n'.repeat(5_000)",
                "'> - '.repeat(200) + 'a'",
                "'$a$ '.repeat(20_000)",
                "'$a'.repeat(20_000) + '$$b'.repeat(20_000)",
                "'\\\\(a'.repeat(20_000)",
                "'$' + 'a^'.repeat(1_000) + 'b$'",
                "'$' + '\\\\hat'.repeat(500) + '{a}$'",
                "'$a' + \"'\".repeat(1_000) + '$'",
            )
        ),
    ],
)
def test_hostile_text_makes_few_nodes_and_loses_nothing(page: ChatPage, text: str) -> None:
    page.load(keeps_limits=True)
    put(page, text)
    assert page.evaluate("window.view.node.querySelectorAll('*').length") < 10_000
    depth = (
        "((node) => { let most = 0; for (const one of node.querySelectorAll('*')) {"
        " let depth = 0; for (let at = one; at !== node; at = at.parentNode) depth += 1;"
        " most = Math.max(most, depth); } return most; })(window.view.node)"
    )
    assert page.evaluate(depth) < 60
    letters = "/[^ab]/g, ''"
    assert page.evaluate(f"window.view.node.textContent.replace({letters}).length") == (
        page.evaluate(f"({text}).replace({letters}).length")
    )
    # The page is usable.
    page.speak("yes")
    page.ask("hello")
    assert page.console == []


@pytest.mark.slow
def test_text_that_the_parser_cannot_finish_is_shown_as_it_is(page: ChatPage) -> None:
    # Without an answer of the worker, the limit ends it.
    page.evaluate(
        "import('/page/markdown/lexer.js').then(({ lexer }) => { lexer.ask = async () => null; })"
    )
    page.speak("a **b**\n\nc")
    page.ask("hello")
    assert page.text(".markdown .plain") == "a **b**\n\nc"


@pytest.mark.slow
def test_text_is_shown_as_it_is_without_a_worker(page: ChatPage) -> None:
    page.evaluate("window.Worker = class { constructor() { throw new Error('none'); } }; 0")
    page.speak("a **b**")
    page.ask("hello")
    assert page.text(".markdown .plain") == "a **b**"


@pytest.mark.slow
def test_worker_that_takes_too_long_is_replaced(page: ChatPage) -> None:
    page.load(keeps_limits=True)
    slow = (
        "import('/page/markdown/lexer.js').then(async ({ lexer }) => {"
        " const found = await lexer.ask('*a'.repeat(1_000_000));"
        " const next = await lexer.ask('*a*');"
        " window.outcome = [found, next?.tokens[0].type]; })"
    )
    page.evaluate(slow)
    page.wait_for("window.outcome !== undefined")
    assert page.evaluate("window.outcome") == [None, "paragraph"]


def test_formulas_are_drawn(page: ChatPage) -> None:
    for text, formulas in (
        ("$E = mc^2$ and $x_1$, *a $b*c$ d*", ["E=mc2", "x1", "b\u2217c"]),
        (r"\(a \le b\) and \[x^2\,dx\]", ["a\u2264b", "x2dx"]),
        ("**$x_1$** _and $a_{1}$ b_", ["x1", "a1"]),
        ("- a\n- b $\\alpha$\n\n| $x$ |\n|---|\n| $y$ |", ["\u03b1", "x", "y"]),
        ("text\n$$\na\n- b\n= c\n$$\nmore $$d$$", ["a\u2212b=c", "d"]),
        ("\\[\n\\frac{1}{2}\n\\]\n\n1. a\n   $$\n   b\n   $$", ["12", "b"]),
        (r"$$\begin{aligned} a &= b \\ &= c \end{aligned}$$", ["a=b=c"]),
        (r"$\sqrt[3]{x} \ne \boxed{42}$ $\text{if } \mathbb{R}$", ["x3\u226042", "if\xa0\u211d"]),
        # Money, variables of a shell, code and escapes.
        ("costs $5 and $10, US$5-$6, $HOME:$PATH", []),
        ("`$x$` \\$5 is $ 5 $ and 3$", []),
        ("```\n$x$\n```", []),
    ):
        for draw in (put, grow):
            page.evaluate("document.getElementById('messages').replaceChildren()")
            draw(page, json.dumps(text))
            assert page.texts(".markdown math") == formulas
            assert page.count(".markdown .plain") == 0
    assert page.console == []


def test_formula_that_cannot_be_drawn_is_its_source(page: ChatPage) -> None:
    for formula in (
        r"$x^2\,dx + \unknown_a*b*$",
        r"\(a\;b \{c\} \unknown\)",
        "$$\n\\unknown{a}\n* b\n$$",
        r"\[a\\b \tag{1}\]",
        r"$\frac{a}$",
        r"$\left( a$",
        r"$a}$",
        r"$^{" + "{" * 20 + "}" * 20 + "}$",
        "$$\na\n* b\\,c",
        "\\[ a_b_c \\, *d*",
    ):
        page.evaluate("document.getElementById('messages').replaceChildren()")
        put(page, json.dumps(f"Before\n\n{formula}"))
        assert page.count("math") == 0
        assert page.text(".markdown").removeprefix("Before") == formula
    assert page.console == []


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


@pytest.mark.slow
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
        "__proto__",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("nothing", "", "constructor", "plaintext")
        ),
    ],
)
def test_code_of_no_known_language_has_no_colors(page: ChatPage, language: str) -> None:
    put(page, fenced(CODE, language))
    rest(page)
    assert page.evaluate(COLORED) == []
    assert page.console == []


@pytest.mark.slow
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


@pytest.mark.slow
def test_code_inside_of_a_list_has_colors(page: ChatPage) -> None:
    put(page, json.dumps("- a\n\n  ```python\n  x = 1\n  ```\n"))
    assert colored(page) == [["code-number", "1"]]


@pytest.mark.slow
def test_code_inside_of_a_string_is_no_string(page: ChatPage) -> None:
    put(page, fenced('f"a {b + 1} c"\n'))
    assert sorted(colored(page, 3)) == [
        ["code-number", "1"],
        ["code-string", ' c"'],
        ["code-string", 'f"a '],
    ]


@pytest.mark.slow
def test_text_that_spans_many_lines_is_colored_in_all_of_them(page: ChatPage) -> None:
    # Lines are laid out in parts of 32.
    doc = '"""' + "".join(f"line {number}\n" for number in range(40)) + '"""'
    put(page, fenced(f"x = 1\n{doc}\n"))
    strings = [text for kind, text in colored(page, 3) if kind == "code-string"]
    assert "".join(strings) == doc


@pytest.mark.slow
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


@pytest.mark.slow
def test_colors_of_code_that_is_gone_are_freed(page: ChatPage) -> None:
    put(page, fenced(CODE))
    colored(page)
    page.evaluate("window.view.node.remove()")
    page.wait_for(f"{COLORED}.length === 0")


@pytest.mark.slow
def test_code_that_takes_too_long_stays_in_one_color(page: ChatPage) -> None:
    page.load(keeps_limits=True)
    slow: Any = "'```python\\n' + 'x = foo(1, \"a\")\\n'.repeat(20_000) + '```\\n'"
    put(page, slow)
    rest(page)
    assert page.evaluate(COLORED) == []
    put(page, fenced(CODE))
    assert len(colored(page, len(KINDS))) == len(KINDS)
