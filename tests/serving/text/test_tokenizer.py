"""Tokenizers of checkpoints, their side files, and the errors of broken ones."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from cluster.serving.text.chat_template import ChatTemplate
from cluster.serving.text.template_arguments import ChatMessage, ChatPrompt
from cluster.serving.text.tokenizer import Tokenizer
from pagedray.errors import CheckpointError, InvalidRequestError, StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence
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


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": "\u00e9<"}}}]
BY_NAME = [
    {"name": "tool_use", "template": "tools {{ tools | tojson }}"},
    {"name": "default", "template": "plain {{ messages[0].content }}"},
]
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
TRIMMING = PLAIN.replace("m.content", "m.content | trim")
SPACED = PLAIN.replace("{{ eos_token }}", " {{ eos_token }}")
MIXED = "The quick <think> x <x><late><early>  <pad> brown <|system|>fox </s>"
HALVING = PLAIN.replace("m.content", "m.content.split('</think>') | last")


@pytest.fixture
def side_copy(folder: Path, tmp_path: Path) -> Path:
    copied = shutil.copytree(folder, tmp_path / "copy")
    # Transformers requires that an object names its type.
    configure(copied, eos_token="</s>")
    return copied


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def theirs(folder: Path) -> Any:  # Any: transformers' types are not precise
    return PreTrainedTokenizerFast.from_pretrained(folder)


def rendered_by_both(
    folder: Path,
    messages: Sequence[ChatMessage],
    tools: Sequence[dict[str, Any]] = (),
    *,
    continues: bool = False,
) -> tuple[str, str]:
    ours = Tokenizer.from_folder(folder).render_chat(
        ChatPrompt(
            tuple(messages),
            tuple(tools),
            adds_generation_prompt=False,
            continues_final_message=continues,
        )
    )
    text = theirs(folder).apply_chat_template(
        [{"role": one.role, "content": one.content} for one in messages],
        tools=list(tools) or None,
        tokenize=False,
        continue_final_message=continues,
    )
    return ours, text


@pytest.mark.parametrize("tools", [[], TOOLS])
@pytest.mark.parametrize("templates", [BY_NAME, {one["name"]: one["template"] for one in BY_NAME}])
def test_templates_are_chosen_by_tools(
    side_copy: Path, templates: object, tools: list[Any]
) -> None:
    configure(side_copy, chat_template=templates)
    ours, expected = rendered_by_both(side_copy, [ChatMessage("user", "x")], tools)
    assert ours == expected
    assert ours.startswith("tools" if tools else "plain")


@pytest.mark.parametrize("tools", [[], TOOLS])
def test_files_of_templates_win_over_the_settings(side_copy: Path, tools: list[Any]) -> None:
    configure(side_copy, chat_template="settings")
    (side_copy / "chat_template.jinja").write_text("a file")
    more = side_copy / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("a file for tools")
    ours, expected = rendered_by_both(side_copy, [ChatMessage("user", "x")], tools)
    assert ours == expected
    assert ours.startswith("a file")


def test_a_template_for_tools_alone_rejects_other_conversations(side_copy: Path) -> None:
    configure(side_copy, chat_template=BY_NAME[:1])
    ours, expected = rendered_by_both(side_copy, [ChatMessage("user", "x")], TOOLS)
    assert ours == expected
    with pytest.raises(InvalidRequestError, match="no chat template for conversations without"):
        Tokenizer.from_folder(side_copy).render_chat(ChatPrompt((ChatMessage("user", "x"),)))


@pytest.mark.parametrize("templates", [3, ["x"], [{"name": "default"}]])
def test_a_template_of_another_type_is_named(side_copy: Path, templates: object) -> None:
    configure(side_copy, chat_template=templates)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template must be"):
        Tokenizer.from_folder(side_copy)


@pytest.mark.parametrize("template", ["{% break %}", "{% if %}", "{{ 'x" + "{%"])
def test_an_invalid_template_is_named_in_one_line(side_copy: Path, template: str) -> None:
    configure(side_copy, chat_template=template)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json has an invalid") as caught:
        Tokenizer.from_folder(side_copy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        "",
        "indent=2",
        "separators=(',', ':')",
        "separators=[',', ':']",
        "ensure_ascii=true",
        "sort_keys=true",
        "true, 4, none, true",
        "ensure_ascii=false, indent=none, separators=(', ', ': '), sort_keys=false",
    ],
)
def test_tojson_writes_what_transformers_writes(side_copy: Path, options: str) -> None:
    configure(side_copy, chat_template=f"{{{{ tools | tojson({options}) }}}}")
    ours, expected = rendered_by_both(side_copy, [ChatMessage("user", "x")], TOOLS)
    assert ours == expected


@pytest.mark.parametrize("content", ["so", " so ", "so \n", "s </s> o "])
@pytest.mark.parametrize("template", [PLAIN, TRIMMING, SPACED, HALVING])
def test_a_final_message_is_continued_where_transformers_does(
    side_copy: Path, template: str, content: str
) -> None:
    configure(side_copy, chat_template=template)
    messages = [ChatMessage("user", "x"), ChatMessage("assistant", content)]
    ours, expected = rendered_by_both(side_copy, messages, continues=True)
    assert ours == expected


def test_a_final_message_of_which_a_part_is_omitted_cannot_be_continued(side_copy: Path) -> None:
    configure(side_copy, chat_template=HALVING)
    messages = [ChatMessage("assistant", "thought</think>said")]
    with pytest.raises(InvalidRequestError, match="omits the final message or a part of it"):
        Tokenizer.from_folder(side_copy).render_chat(
            ChatPrompt(tuple(messages), continues_final_message=True)
        )
    with pytest.raises(ValueError, match="does not appear in the chat"):
        rendered_by_both_theirs(side_copy, messages)


def rendered_by_both_theirs(folder: Path, messages: Sequence[ChatMessage]) -> None:
    theirs(folder).apply_chat_template(
        [{"role": one.role, "content": one.content} for one in messages],
        tokenize=False,
        continue_final_message=True,
    )


def added(content: str, **flags: bool) -> dict[str, Any]:
    return {"content": content} | {
        key: flags.get(key, False)
        for key in ("single_word", "lstrip", "rstrip", "normalized", "special")
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"added_tokens_decoder": {"300": added("<think>"), "301": added("<x>", special=True)}},
        {"added_tokens_decoder": {"302": added("<late>"), "9": added("<early>")}},
        {"added_tokens_decoder": {"300": added("<pad>")}, "pad_token": "<pad>"},
        {"added_tokens_decoder": {"300": added("<think>", lstrip=True, rstrip=True)}},
        {"pad_token": "<pad>", "mask_token": "The"},
        {"additional_special_tokens": ["<think>", "quick"]},
        {"extra_special_tokens": {"image_token": "<think>"}},
    ],
)
def test_tokens_of_the_settings_are_those_of_transformers(
    side_copy: Path, changes: dict[str, Any]
) -> None:
    before = Tokenizer.from_folder(side_copy)
    configure(side_copy, **changes)
    ids = checked_ids(side_copy)
    assert ids != before.encode(MIXED) or Tokenizer.from_folder(side_copy).decode(ids) != MIXED


@pytest.mark.parametrize(
    "changes",
    [
        {"added_tokens_decoder": {"4": added("<|system|>")}},
        {"add_bos_token": False, "add_eos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
    ],
)
def test_what_transformers_ignores_has_no_effect(side_copy: Path, changes: dict[str, Any]) -> None:
    before = Tokenizer.from_folder(side_copy).encode(MIXED)
    configure(side_copy, **changes)
    assert checked_ids(side_copy) == before


def checked_ids(folder: Path) -> list[int]:
    """Compare a folder's tokenizer with that of transformers, and return the ids of a text."""
    ours, other = Tokenizer.from_folder(folder), theirs(folder)
    ids = ours.encode(MIXED)
    assert ids == other.encode(MIXED)
    assert ours.encode(MIXED, add_special_tokens=False) == other.encode(
        MIXED, add_special_tokens=False
    )
    assert ours.vocab_size == len(other)
    for skips in (False, True):
        expected = other.decode(ids, skip_special_tokens=skips)
        assert ours.decode(ids, skip_special_tokens=skips) == expected
    assert {token_id for token_id in range(310) if ours.token_bytes.is_special(token_id)} == {
        token_id for token_id, token in other.added_tokens_decoder.items() if token.special
    }
    return ids


@pytest.mark.parametrize("entries", [[], {"x": {"content": "<a>"}}, {"300": "<a>"}, {"300": {}}])
def test_a_wrong_list_of_added_tokens_is_named(side_copy: Path, entries: object) -> None:
    configure(side_copy, added_tokens_decoder=entries)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: added_tokens_decoder"):
        Tokenizer.from_folder(side_copy)
