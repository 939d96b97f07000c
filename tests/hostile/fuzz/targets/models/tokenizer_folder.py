"""tokenizer.json and tokenizer_config.json of a model's folder, and a text for the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from cluster.serving.text.template_arguments import ChatMessage, ChatPrompt
from cluster.serving.text.tokenizer import LibraryPanicError, Tokenizer
from pagedray.errors import CheckpointError, InvalidRequestError
from tests.hostile.fuzz.scratch import scratch_folder
from tests.hostile.fuzz.target import Target, check_message

_FOLDER = scratch_folder()
_NAMES = ("tokenizer.json", "tokenizer_config.json")


def _vocabulary(*tokens: str) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def _added(number: int, content: str) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **flags, "special": True}


def _sequence(name: str, number: int) -> dict[str, object]:
    return {"Sequence": {"id": name, "type_id": number}}


_BPE = {
    "version": "1.0",
    "added_tokens": [_added(0, "<s>")],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, _sequence("A", 0)],
        "pair": [_sequence("A", 0), _sequence("B", 1)],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    },
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "vocab": _vocabulary("<s>", "a", "b", "ab"), "merges": ["a b"]},
}
_WORDS = {
    "version": "1.0",
    "truncation": {"max_length": 8, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
    "added_tokens": [],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]},
    "pre_tokenizer": {
        "type": "Split",
        "pattern": {"Regex": "\\s+"},
        "behavior": "Removed",
        "invert": False,
    },
    "model": {"type": "WordLevel", "vocab": _vocabulary("a", "b", "?"), "unk_token": "?"},
}
_SETTINGS = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "lstrip": False},
    "added_tokens_decoder": {"4": {"content": "</s>", "special": True}, "5": {"content": "<x>"}},
    "additional_special_tokens": ["<y>"],
    "chat_template": "{{ bos_token }}{% for one in messages %}{{ one.content }}{% endfor %}",
}


def run(data: bytes) -> None:
    """Return token ids, or a documented error, with the file that the first byte selects."""
    if not data:
        return
    place = data[0] % len(_NAMES)
    Path(_FOLDER, _NAMES[place]).write_bytes(data[1:])
    if place:
        Path(_FOLDER, _NAMES[0]).write_text(json.dumps(_BPE))
    else:
        Path(_FOLDER, _NAMES[1]).unlink(missing_ok=True)
    try:
        tokenizer = Tokenizer.from_folder(_FOLDER)
    except CheckpointError as error:
        check_message(error)
        return
    try:
        marked = tokenizer.render_marked_chat(
            ChatPrompt((ChatMessage(role="user", content="ab <s> \u00e9"),)),
            marks_special_tokens=True,
        )
        tokenizer.decode(tokenizer.encode_marked(marked))
        tokenizer.decode(tokenizer.encode("ab ba\n"))
    except (InvalidRequestError, LibraryPanicError):
        return
    # The library raises no more specific error for a tokenizer that its file describes wrongly.
    except Exception as error:
        if type(error) is not Exception:
            raise


TARGET = Target(
    run=run,
    seeds=(
        b"\x00" + json.dumps(_BPE).encode(),
        b"\x00" + json.dumps(_WORDS).encode(),
        b"\x01" + json.dumps(_SETTINGS).encode(),
    ),
    words=(
        *(b'"Unigram"', b'"WordPiece"', b'"ByteFallback"', b'"Metaspace"', b'"Replace"', b'"Fuse"'),
        *(b'"Strip"', b'"Precompiled"', b'"Prepend"', b'"Sequence"', b"4294967295", b"-1", b"null"),
        *(b'"byte_fallback":true', b'"continuing_subword_prefix":"##"', b"(a+)+$", b"{{", b"{%"),
    ),
)
