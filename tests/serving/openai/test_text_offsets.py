"""`text_offset` says where each token begins in the text of a choice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest
import tokenizers
from tokenizers import decoders, models

from cluster.serving.openai.response_choice import TextOffsets
from cluster.serving.text.token_bytes import TokenBytes

if TYPE_CHECKING:
    from tests.serving.conftest import Server

SPECIAL = "<|user|>"
TEXT = "an \u00e9\U0001f389 and"


def completion(server: Server, token_ids: list[int], **given: Any) -> dict[str, Any]:  # Any: JSON
    """Return the choice of a completion that generates these tokens, whatever they are."""
    server.engine.reset()
    server.engine.script = lambda request, index: token_ids
    body = {
        "model": "tiny",
        "prompt": "hello",
        "max_tokens": len(token_ids),
        "ignore_eos": True,
        "logprobs": 0,
        **given,
    }
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    server.engine.reset()
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def check_offsets(choice: dict[str, Any], token_ids: list[int], server: Server) -> int:
    """Check the offset of each token, and return how many show in the text."""
    offsets, text = choice["logprobs"]["text_offset"], choice["text"]
    token_bytes = server.tokenizer.token_bytes
    num_shown, at = 0, 0
    for token_id, offset in zip(token_ids, offsets, strict=True):
        data = token_bytes.bytes_of(token_id)
        # Characters of which not all bytes have come do not count.
        assert offset == len(text.encode()[:at].decode(errors="ignore"))
        if text.encode()[at:].startswith(data):
            at += len(data)
            num_shown += 1
        else:
            assert token_bytes.is_special(token_id)
    assert at == len(text.encode())
    return num_shown


def tokens_of(server: Server, text: str) -> list[int]:
    return server.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("by_id", [True, False])
def test_generated_tokens(server: Server, skips: bool, by_id: bool) -> None:
    token_ids = [*tokens_of(server, TEXT), 0, *tokens_of(server, TEXT)]
    choice = completion(
        server,
        token_ids,
        skip_special_tokens=skips,
        return_tokens_as_token_ids=by_id,
    )
    assert check_offsets(choice, token_ids, server) == len(token_ids) - skips


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("is_text", [True, False])
def test_echoed_tokens(server: Server, is_text: bool, skips: bool) -> None:
    text = f"{TEXT}{SPECIAL}{TEXT}"
    prompt = text if is_text else server.tokenizer.encode(text)
    token_ids = tokens_of(server, TEXT)
    choice = completion(
        server,
        token_ids,
        prompt=prompt,
        echo=True,
        return_token_ids=True,
        skip_special_tokens=skips,
    )
    prompt_ids = choice["prompt_token_ids"]
    assert sum(map(server.tokenizer.token_bytes.is_special, prompt_ids)) == 2
    num_shown = check_offsets(choice, prompt_ids + token_ids, server)
    # A text has the token that it was written with, but not the one that begins the prompt.
    num_hidden = 1 if is_text else 2 if skips else 0
    assert num_shown == len(prompt_ids) + len(token_ids) - num_hidden


def test_bytes_of_one_character_begin_where_it_does() -> None:
    tokens = ["\u2581an", "<0xC3>", "<0xA9>", "."]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    assert tokenizer.decode([0, 1, 2, 3, 1, 3]) == "an\u00e9.\ufffd."
    offsets = TextOffsets.of_prompt(TokenBytes(tokenizer))
    assert offsets.of_tokens([0, 1, 2, 3, 1, 3]) == [0, 2, 2, 3, 4, 5]
