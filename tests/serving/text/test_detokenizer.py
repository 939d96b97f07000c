"""Tokens to text, token by token, and the text of a sequence's events."""

from __future__ import annotations

import tracemalloc
from itertools import chain
from typing import TYPE_CHECKING, Any

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from cluster.scheduling.event import TokenEvent
from cluster.serving.text.text_stream import (
    IncrementalDetokenizer,
    SequenceOutput,
    StopMatcher,
    StopStrings,
    TextStream,
    TokenBytes,
)
from pagedray.batch import TokenLogprobs
from pagedray.request import FinishReason, Request
from pagedray.sampling_params import SamplingParams
from tests.serving.conftest import TEXT

if TYPE_CHECKING:
    from cluster.serving.text.tokenizer import Tokenizer

_TOKENS = (
    "<s>", "</s>", "\u2581hello", "\u2581", "world", "\u2581\u2581", ".",
    *(f"<0x{byte:02X}>" for byte in range(256)),
)  # fmt: skip


def _byte_fallback_tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(
        models.BPE({token: index for index, token in enumerate(_TOKENS)}, [], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


FALLBACK = _byte_fallback_tokenizer()


def _pieces(token_bytes: TokenBytes, token_ids: list[int], *, continues: bool = False) -> list[str]:
    detokenizer = IncrementalDetokenizer(token_bytes, is_continuation=continues)
    return [*(detokenizer.add_tokens((token_id,)) for token_id in token_ids), detokenizer.flush()]


def test_no_piece_splits_a_character(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False)
    pieces = _pieces(tokenizer.token_bytes, token_ids)
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert "\U0001f642" in pieces


@given(token_ids=st.lists(st.integers(0, 400), max_size=40))
@settings(max_examples=100)
def test_pieces_are_what_decoding_all_gives(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    # Ids beyond the tokenizer's vocabulary exist in the model only.
    assert "".join(_pieces(tokenizer.token_bytes, token_ids)) == tokenizer.decode(token_ids)


def test_broken_bytes_become_replacement_characters_at_once(tokenizer: Tokenizer) -> None:
    lone = tokenizer.encode("\u00e9", add_special_tokens=False)[0]
    pieces = _pieces(tokenizer.token_bytes, [lone] * 5)
    assert pieces == ["", "\ufffd", "\ufffd", "\ufffd", "\ufffd", "\ufffd"]


@given(
    texts=st.lists(
        st.sampled_from(["\u2581hello", "\u2581", "world", "\u2581\u2581", ".", "</s>"])
        | st.characters(exclude_categories=["Cs"]),
        max_size=30,
    )
)
@settings(max_examples=100)
def test_byte_fallback_and_prefix_space_are_what_decoding_all_gives(texts: list[str]) -> None:
    token_ids: list[int] = []
    for text in texts:
        tokens = [text] if text in _TOKENS else [f"<0x{byte:02X}>" for byte in text.encode()]
        token_ids += [_TOKENS.index(token) for token in tokens]
    expected = FALLBACK.decode(token_ids, skip_special_tokens=True)
    assert "".join(_pieces(TokenBytes(FALLBACK), token_ids)) == expected


@given(
    token_ids=st.lists(
        st.integers(0, len(_TOKENS) + 3)
        | st.sampled_from([_TOKENS.index(f"<0x{byte:02X}>") for byte in b"a\n \xe4\xbd\xa0\xff"]),
        max_size=20,
    )
)
@settings(max_examples=150)
def test_invalid_bytes_in_a_row_are_what_decoding_all_gives(token_ids: list[int]) -> None:
    expected = FALLBACK.decode(token_ids, skip_special_tokens=True)
    assert "".join(_pieces(TokenBytes(FALLBACK), token_ids)) == expected


@given(data=st.data())
@settings(max_examples=150)
def test_tokens_that_come_together_are_what_decoding_all_gives(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    # The pairs of bytes are halves of characters, as often as not.
    fallback_ids = st.integers(0, len(_TOKENS) + 3) | st.sampled_from(
        [_TOKENS.index(f"<0x{byte:02X}>") for byte in b"\n\xc3\xa9"]
    )
    for token_bytes, decode, ids in (
        (tokenizer.token_bytes, tokenizer.decode, st.integers(0, 400)),
        (TokenBytes(FALLBACK), FALLBACK.decode, fallback_ids),
    ):
        messages = data.draw(st.lists(st.lists(ids, max_size=6), max_size=6))
        detokenizer = IncrementalDetokenizer(token_bytes, is_continuation=False)
        text = "".join(map(detokenizer.add_tokens, messages)) + detokenizer.flush()
        assert text == decode(list(chain.from_iterable(messages)))


def test_special_tokens_are_kept_on_request() -> None:
    token_ids = [_TOKENS.index(token) for token in ("<s>", "world", "<0x0A>", "</s>")]
    kept = IncrementalDetokenizer(
        TokenBytes(FALLBACK), is_continuation=False, skips_special_tokens=False
    )
    text = kept.add_tokens(token_ids) + kept.flush()
    assert text == FALLBACK.decode(token_ids, skip_special_tokens=False)


def test_a_byte_becomes_text_with_the_first_token_behind_its_row() -> None:
    tokens = ["world", "<0x0A>", "<0xFF>", "world", "<0x0A>"]
    token_ids = [_TOKENS.index(token) for token in tokens]
    pieces = _pieces(TokenBytes(FALLBACK), token_ids)
    assert pieces == ["world", "", "", "\ufffd\ufffdworld", "", "\n"]


def test_a_continuation_keeps_its_leading_space() -> None:
    token_ids = [_TOKENS.index("\u2581hello")]
    assert "".join(_pieces(TokenBytes(FALLBACK), token_ids)) == "hello"
    assert "".join(_pieces(TokenBytes(FALLBACK), token_ids, continues=True)) == " hello"


def _cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    pieces=st.lists(st.text("ab\u00e9", max_size=4), max_size=20),
    stops=st.lists(st.text("ab\u00e9", min_size=1, max_size=4), max_size=4),
)
@settings(max_examples=250)
def test_stop_strings_cut_as_if_the_text_was_whole(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    text, found = "", None
    for piece in pieces:
        certain, found = matcher.match_text(piece)
        text += certain
        if found is not None:
            break
    if found is None:
        text += matcher.flush()
    assert (text, found) == _cut("".join(pieces), stops)


@given(
    texts=st.lists(st.text("ab", max_size=12), min_size=1, max_size=6),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=16),
)
@settings(max_examples=150)
def test_sequences_of_a_call_share_their_stop_strings(texts: list[str], stops: list[str]) -> None:
    # Each text finds states that those before it have made.
    shared = StopStrings(stops)
    for text in texts:
        matcher = StopMatcher(shared)
        certain, found = matcher.match_text(text)
        if found is None:
            certain += matcher.flush()
        assert (certain, found) == _cut(text, stops)


def test_long_stop_strings_cost_a_sequence_little() -> None:
    # Tables for each of 128 sequences would take 400 MiB and a fifth of a second.
    stops = StopStrings(["a" * 511 + last for last in "bcdefghijklmnopq"])
    tracemalloc.start()
    matchers = [StopMatcher(stops) for _ in range(128)]
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes < 2**16
    assert matchers[0].match_text("a" * 600) == ("a" * 89, None)
    assert matchers[1].match_text("a" * 511 + "q") == ("", "a" * 511 + "q")


@given(
    text=st.text(alphabet="aTh \u00e9\U0001f642", max_size=30),
    stops=st.lists(st.text("aTh \u00e9\U0001f642", min_size=1, max_size=3), max_size=3),
)
@settings(max_examples=100)
def test_tokens_and_stop_strings_together(
    tokenizer: Tokenizer, text: str, stops: list[str]
) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    matcher = StopMatcher(StopStrings(stops))
    got, found = "", None
    for piece in _pieces(tokenizer.token_bytes, token_ids):
        certain, found = matcher.match_text(piece)
        got += certain
        if found is not None:
            break
    if found is None:
        got += matcher.flush()
    assert (got, found) == _cut(tokenizer.decode(token_ids), stops)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(StopStrings(["</tool>"]))
    assert matcher.match_text("text <") == ("text ", None)
    assert matcher.match_text("/to") == ("", None)
    assert matcher.match_text("p") == ("</top", None)


# Any: fields of all types
def _stream(tokenizer: Tokenizer, *, includes_stop: bool = False, **sampling: Any) -> TextStream:
    request = Request(
        id="r",
        prompt_token_ids=(0,),
        sampling=SamplingParams(**sampling),
        seed=0,
        eos_token_ids=(1,),
    )
    stops = StopStrings(request.sampling.stop)
    return TextStream(
        request,
        0,
        tokenizer.token_bytes,
        stops=stops,
        skips_special_tokens=not includes_stop,
        includes_stop=includes_stop,
    )


def _feed(
    stream: TextStream, token_ids: list[int], *, end: FinishReason, stop_id: int | None = None
) -> list[SequenceOutput]:
    outputs = []
    for position, token_id in enumerate(token_ids):
        is_last = position == len(token_ids) - 1
        event = TokenEvent(
            "r",
            0,
            (token_id,),
            finish_reason=end if is_last else None,
            stop_token_id=stop_id if is_last else None,
        )
        outputs.append(stream.add_events([event]))
        if stream.is_finished:
            break
    return outputs


def _text(outputs: list[SequenceOutput]) -> str:
    return "".join(output.text for output in outputs)


def test_stop_string_across_tokens_is_cut_and_ends_the_sequence(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("The quick brown fox", add_special_tokens=False)
    stream = _stream(tokenizer, stop=("ck br",))
    outputs = _feed(stream, token_ids, end=FinishReason.LENGTH)
    assert _text(outputs) == "The qui"
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].stop_reason == "ck br"
    assert stream.is_finished


def test_tokens_end_with_the_one_that_completes_a_stop_string(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("aXbX", add_special_tokens=False)
    logprobs = tuple(TokenLogprobs(float(-token_id), [], []) for token_id in token_ids)
    stream = _stream(tokenizer, stop=("X",))
    output = stream.add_events([TokenEvent("r", 0, tuple(token_ids), logprobs=logprobs)])
    assert output.text == "a"
    assert output.token_ids == tuple(token_ids[:2])
    assert output.logprobs == logprobs[:2]


def test_held_back_text_comes_at_the_end(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("The quick", add_special_tokens=False)
    outputs = _feed(_stream(tokenizer, stop=("quick!",)), token_ids, end=FinishReason.LENGTH)
    assert _text(outputs) == "The quick"
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_stop_token_has_no_text_but_is_named(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("abx", add_special_tokens=False)
    stream = _stream(tokenizer, stop_token_ids=(token_ids[-1],))
    outputs = _feed(stream, token_ids, end=FinishReason.STOP, stop_id=token_ids[-1])
    assert _text(outputs) == "ab"
    assert outputs[-1].stop_reason == token_ids[-1]
    assert outputs[-1].token_ids == (token_ids[-1],)


def test_end_of_sequence_has_no_text_and_no_name(tokenizer: Tokenizer) -> None:
    token_ids = [*tokenizer.encode("ab", add_special_tokens=False), 1]
    outputs = _feed(_stream(tokenizer), token_ids, end=FinishReason.STOP, stop_id=1)
    assert _text(outputs) == "ab"
    assert outputs[-1].stop_reason is None


def test_the_clients_stop_token_is_included_on_request(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("abx", add_special_tokens=False)
    stream = _stream(tokenizer, includes_stop=True, stop_token_ids=(token_ids[-1],))
    outputs = _feed(stream, token_ids, end=FinishReason.STOP, stop_id=token_ids[-1])
    assert _text(outputs) == "abx"
    assert outputs[-1].stop_reason == token_ids[-1]


def test_end_of_sequence_is_not_included_with_the_stop(tokenizer: Tokenizer) -> None:
    token_ids = [*tokenizer.encode("ab", add_special_tokens=False), 1]
    stream = _stream(tokenizer, includes_stop=True)
    assert _text(_feed(stream, token_ids, end=FinishReason.STOP, stop_id=1)) == "ab"


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("aXbX", add_special_tokens=False)
    stream = _stream(tokenizer, stop=("X",), min_tokens=2)
    assert _text(_feed(stream, token_ids, end=FinishReason.LENGTH)) == "aXb"


def test_incomplete_character_at_the_end_becomes_a_replacement_character(
    tokenizer: Tokenizer,
) -> None:
    token_ids = tokenizer.encode("a\u4f60", add_special_tokens=False)[:-1]
    assert _text(_feed(_stream(tokenizer), token_ids, end=FinishReason.LENGTH)) == "a\ufffd"


def test_many_events_become_one_output(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("The quick", add_special_tokens=False)
    events = [TokenEvent("r", 0, (token_id,)) for token_id in token_ids]
    output = _stream(tokenizer).add_events(events)
    assert output.text == "The quick"
    assert output.token_ids == tuple(token_ids)


def test_an_end_behind_other_events_stops_there(tokenizer: Tokenizer) -> None:
    token_ids = [*tokenizer.encode("The quick", add_special_tokens=False), 1]
    events = [TokenEvent("r", 0, (token_id,)) for token_id in token_ids[:-1]]
    end = TokenEvent("r", 0, (1,), finish_reason=FinishReason.STOP, stop_token_id=1)
    output = _stream(tokenizer).add_events([*events, end])
    assert output.text == "The quick"
    assert output.token_ids == tuple(token_ids)
    assert output.finish_reason is FinishReason.STOP
