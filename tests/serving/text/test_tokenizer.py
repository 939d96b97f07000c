"""Tokenizers of checkpoints, and the errors of broken ones."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from cluster.serving.text.templates.chat_prompt import ChatMessage, ChatPrompt
from cluster.serving.text.templates.chat_template import ChatTemplate
from cluster.serving.text.tokenizer import Tokenizer
from pagedray.errors import CheckpointError, InvalidRequestError, StartupError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder, tmp_path / "copy")


def test_encoding_applies_the_post_processor(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("The")[0] == 0
    assert 0 not in tokenizer.encode("The", add_special_tokens=False)
    assert tokenizer.eos_token_ids == (1,)


def test_text_is_encoded_equally_while_other_threads_run(tokenizer: Tokenizer) -> None:
    text = "The quick brown fox. " * 1000
    assert tokenizer.encode_without_gil(text) == tokenizer.encode(text)


def test_text_is_encoded_equally_without_a_cache(tokenizer: Tokenizer, copy: Path) -> None:
    # tests.load.tenant_timing measures that the times are equal, too.
    uncached = Tokenizer.from_folder(copy)
    uncached.disable_cache()
    text = "The quick brown fox, the quick brown dog. " * 3
    assert uncached.encode(text) == uncached.encode(text) == tokenizer.encode(text)


def test_time_to_encode_is_linear(tokenizer: Tokenizer) -> None:
    def least_s(size: int) -> float:
        times_s = []
        for _ in range(3):
            started_s = time.perf_counter()
            tokenizer.encode_without_gil("a" * size)
            times_s.append(time.perf_counter() - started_s)
        # Others may have had the processor meanwhile.
        return min(times_s)

    assert least_s(200_000) < 5 * least_s(100_000) + 0.1


def test_chat_is_rendered_by_the_checkpoints_template(tokenizer: Tokenizer) -> None:
    text = tokenizer.render_chat(ChatPrompt((ChatMessage("user", "hi"),)))
    assert text == "<s><|user|>hi</s><|assistant|>"


def test_template_may_reject_messages(tokenizer: Tokenizer) -> None:
    messages = ChatMessage("user", "hi"), ChatMessage("system", "no")
    with pytest.raises(InvalidRequestError, match="The system speaks first"):
        tokenizer.render_chat(ChatPrompt(messages))


def test_template_has_the_helpers_that_templates_expect() -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}"
        "{% continue %}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    template = ChatTemplate(source, {}, origin="here")
    assert template.render(ChatPrompt((ChatMessage("user", "\u00e9<"),))) == (
        '{"role": "user", "content": "\u00e9<"}4'
    )


def test_tojson_has_the_options_of_transformers() -> None:
    source = (
        "{% for m in messages %}{{ m | tojson(indent=2) }}{{ m | tojson(separators=(',', ':')) }}"
        "{{ m | tojson(ensure_ascii=true, sort_keys=true) }}{{ m | tojson(true) }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "\u00e9<"}]
    rendered, _ = cast(
        "tuple[list[str], object]", render_jinja_template([messages], chat_template=source)
    )
    template = ChatTemplate(source, {}, origin="here")
    assert [template.render(ChatPrompt((ChatMessage("user", "\u00e9<"),)))] == rendered


def test_template_runs_in_a_sandbox() -> None:
    source = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(InvalidRequestError):
        ChatTemplate(source, {}, origin="here").render(ChatPrompt(()))


def test_jinja_file_comes_before_the_settings(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text("{{ eos_token }}{{ messages[0].content }}")
    assert (
        Tokenizer.from_folder(copy).render_chat(ChatPrompt((ChatMessage("user", "x"),))) == "</s>x"
    )


def test_named_templates_give_the_default_one(copy: Path) -> None:
    path = copy / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["chat_template"] = [
        {"name": "tools", "template": "t"},
        {"name": "default", "template": "d"},
    ]
    path.write_text(json.dumps(settings))
    assert Tokenizer.from_folder(copy).render_chat(ChatPrompt(())) == "d"


def test_model_without_template_rejects_chat(copy: Path) -> None:
    (copy / "tokenizer_config.json").unlink()
    with pytest.raises(InvalidRequestError, match="no chat template"):
        Tokenizer.from_folder(copy).render_chat(ChatPrompt((ChatMessage("user", "x"),)))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("chat_template.jinja", "{% for %}"),
    ],
)
def test_broken_file_is_named_in_one_line(copy: Path, name: str, content: str | None) -> None:
    path = copy / name
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_text(content)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_folder(copy)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


GIVEN = "{% for message in messages %}{{ bos_token + message.content }}\\n{% endfor %}"


def test_a_template_of_the_options_replaces_those_of_the_folder(copy: Path, tmp_path: Path) -> None:
    prompt = ChatPrompt((ChatMessage("user", "caf\u00e9"),))
    tool = {"type": "function", "function": {"name": "f"}}
    path = tmp_path / "{other}.jinja"
    path.write_text(GIVEN.replace("\\n", "\n\u00e9\u20ac"), encoding="utf-8")
    for given, text in (
        (str(path), "<s>caf\u00e9\n\u00e9\u20ac"),
        # As in vLLM, a template on the command line may have escapes.
        (GIVEN + "\u20ac", "<s>caf\u00e9\n\u20ac"),
    ):
        tokenizer = Tokenizer.from_folder(copy, chat_template=given)
        assert tokenizer.render_chat(prompt) == text
        assert tokenizer.render_chat(replace(prompt, tools=(tool,))) == text
        assert tokenizer.template_variables(has_tools=False) == set()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("none.jinja", "'none.jinja' is neither a template nor a readable file: No such file"),
        ("", "'' is neither a template nor a readable file: Is a directory."),
        ("a\0b", "neither a template nor a readable file: embedded null byte."),
        ("{{ x }", "The option chat_template has an invalid chat template: unexpected '}'."),
        ("{{ x }}\\x1", "has an invalid escape: truncated \\xXX escape."),
        ("broken.jinja", "broken.jinja has an invalid chat template: "),
        ("bytes.jinja", "bytes.jinja is not valid UTF-8."),
    ],
)
def test_an_invalid_template_of_the_options_is_rejected_in_one_line(
    copy: Path, given: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / "broken.jinja").write_text("{% for %}")
    (copy / "bytes.jinja").write_bytes(b"\xff{{ x }}")
    monkeypatch.chdir(copy)
    with pytest.raises(StartupError) as caught:
        Tokenizer.from_folder(copy, chat_template=given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_decoder_is_rejected(copy: Path) -> None:
    path = copy / "tokenizer.json"
    settings = json.loads(path.read_text())
    settings["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    path.write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="decoder WordPiece"):
        Tokenizer.from_folder(copy)
