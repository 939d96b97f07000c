"""Conversion of the events of one sequence to text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster.scheduling.event import TokenEvent
from cluster.serving.text.stop_strings import StopStrings
from cluster.serving.text.text_stream import SequenceOutput, TextStream
from pagedray.batch import TokenLogprobs
from pagedray.request import FinishReason, Request
from pagedray.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cluster.serving.text.tokenizer import Tokenizer


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
