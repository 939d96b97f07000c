"""Side files of a tokenizer, read as transformers reads the same folder."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from transformers import PreTrainedTokenizerFast

from cluster.serving.text.templates.chat_prompt import ChatMessage, ChatPrompt
from cluster.serving.text.tokenizer import Tokenizer
from pagedray.errors import CheckpointError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

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
def copy(folder: Path, tmp_path: Path) -> Path:
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
def test_templates_are_chosen_by_tools(copy: Path, templates: object, tools: list[Any]) -> None:
    configure(copy, chat_template=templates)
    ours, expected = rendered_by_both(copy, [ChatMessage("user", "x")], tools)
    assert ours == expected
    assert ours.startswith("tools" if tools else "plain")


@pytest.mark.parametrize("tools", [[], TOOLS])
def test_files_of_templates_win_over_the_settings(copy: Path, tools: list[Any]) -> None:
    configure(copy, chat_template="settings")
    (copy / "chat_template.jinja").write_text("a file")
    more = copy / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("a file for tools")
    ours, expected = rendered_by_both(copy, [ChatMessage("user", "x")], tools)
    assert ours == expected
    assert ours.startswith("a file")


def test_a_template_for_tools_alone_rejects_other_conversations(copy: Path) -> None:
    configure(copy, chat_template=BY_NAME[:1])
    ours, expected = rendered_by_both(copy, [ChatMessage("user", "x")], TOOLS)
    assert ours == expected
    with pytest.raises(InvalidRequestError, match="no chat template for conversations without"):
        Tokenizer.from_folder(copy).render_chat(ChatPrompt((ChatMessage("user", "x"),)))


@pytest.mark.parametrize("templates", [3, ["x"], [{"name": "default"}]])
def test_a_template_of_another_type_is_named(copy: Path, templates: object) -> None:
    configure(copy, chat_template=templates)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template must be"):
        Tokenizer.from_folder(copy)


@pytest.mark.parametrize("template", ["{% break %}", "{% if %}", "{{ 'x" + "{%"])
def test_an_invalid_template_is_named_in_one_line(copy: Path, template: str) -> None:
    configure(copy, chat_template=template)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json has an invalid") as caught:
        Tokenizer.from_folder(copy)
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
def test_tojson_writes_what_transformers_writes(copy: Path, options: str) -> None:
    configure(copy, chat_template=f"{{{{ tools | tojson({options}) }}}}")
    ours, expected = rendered_by_both(copy, [ChatMessage("user", "x")], TOOLS)
    assert ours == expected


@pytest.mark.parametrize("content", ["so", " so ", "so \n", "s </s> o "])
@pytest.mark.parametrize("template", [PLAIN, TRIMMING, SPACED, HALVING])
def test_a_final_message_is_continued_where_transformers_does(
    copy: Path, template: str, content: str
) -> None:
    configure(copy, chat_template=template)
    messages = [ChatMessage("user", "x"), ChatMessage("assistant", content)]
    ours, expected = rendered_by_both(copy, messages, continues=True)
    assert ours == expected


def test_a_final_message_of_which_a_part_is_omitted_cannot_be_continued(copy: Path) -> None:
    configure(copy, chat_template=HALVING)
    messages = [ChatMessage("assistant", "thought</think>said")]
    with pytest.raises(InvalidRequestError, match="omits the final message or a part of it"):
        Tokenizer.from_folder(copy).render_chat(
            ChatPrompt(tuple(messages), continues_final_message=True)
        )
    with pytest.raises(ValueError, match="does not appear in the chat"):
        rendered_by_both_theirs(copy, messages)


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
    copy: Path, changes: dict[str, Any]
) -> None:
    before = Tokenizer.from_folder(copy)
    configure(copy, **changes)
    ids = checked_ids(copy)
    assert ids != before.encode(MIXED) or Tokenizer.from_folder(copy).decode(ids) != MIXED


@pytest.mark.parametrize(
    "changes",
    [
        {"added_tokens_decoder": {"4": added("<|system|>")}},
        {"add_bos_token": False, "add_eos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
    ],
)
def test_what_transformers_ignores_has_no_effect(copy: Path, changes: dict[str, Any]) -> None:
    before = Tokenizer.from_folder(copy).encode(MIXED)
    configure(copy, **changes)
    assert checked_ids(copy) == before


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
def test_a_wrong_list_of_added_tokens_is_named(copy: Path, entries: object) -> None:
    configure(copy, added_tokens_decoder=entries)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: added_tokens_decoder"):
        Tokenizer.from_folder(copy)
