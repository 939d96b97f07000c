"""The Python API, on the shipped model."""

import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from cluster.engine.engine_loop import EngineLoop
from cluster.llm.prompts import SaltedPrompt, SampledPrompt
from pagedray import LLM, FinishReason, SamplingParams
from pagedray.errors import EngineError, InvalidRequestError, OverloadedError
from pagedray.request import Request
from pagedray.sampling_params import Structure
from tests.system.engines import hold_steps, open_llm

SAMPLED = SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_num_seqs=4, max_queued_requests=2) as engine:
        yield engine


def tokens(llm: LLM, prompts: list[str], params: SamplingParams) -> list[tuple[int, ...]]:
    generations = llm.generate(prompts, params, use_tqdm=False)
    return [generation.outputs[0].token_ids for generation in generations]


def test_sampled_tokens_do_not_depend_on_the_batch(llm: LLM) -> None:
    prompts = ["import os", "class Queue:", "def main():\n", "try:"]
    together = tokens(llm, prompts, SAMPLED)
    alone = [tokens(llm, [prompt], SAMPLED)[0] for prompt in prompts]
    assert together == alone
    assert len(set(together)) == len(prompts)


def test_more_prompts_than_the_queue_holds_are_all_served(llm: LLM) -> None:
    prompts = [f"x{index} = " for index in range(15)]
    generations = llm.generate(prompts, SAMPLED, use_tqdm=False)
    assert [len(generation.outputs[0].token_ids) for generation in generations] == [24] * 15


def test_results_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["import os", "class Queue:", "def main():\n", "try:", "x = [", "return "]
    lengths = [3, 40, 7, 40, 1, 22]
    params = [
        SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths
    ]
    together = [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
    assert [len(found) for found in together] == lengths
    alone = [tokens(llm, [one], given)[0] for one, given in zip(prompts, params, strict=True)]
    assert together == alone


def test_progress_has_tokens_per_second(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["import os", "class Queue:"], SAMPLED)
    shown = capsys.readouterr().err
    rates = re.findall(r"est\. speed input: ([\d.]+) toks/s, output: ([\d.]+) toks/s", shown)
    num_output, num_input = (float(rate) for rate in reversed(rates[-1]))
    assert num_output > num_input > 0.0


def test_longest_requests_begin_first_and_few_run_at_once(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.llm.runner._NUM_LEAST", 2)
    engine = llm._engine
    assert isinstance(engine, EngineLoop)
    submit, begun, most = engine.submit_request, list[int](), list[int]()

    def note(request: Request) -> None:
        submit(request)
        begun.append(request.sampling.max_tokens)
        stats = llm.stats().scheduler
        most.append(stats.num_running + stats.num_waiting)

    monkeypatch.setattr(engine, "submit_request", note)
    lengths = [2, 60, 2, 4, 30, 4, 8, 2]
    params = [
        SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths
    ]
    found = llm.generate(["x"] * len(lengths), params, use_tqdm=False)
    assert [len(one.outputs[0].token_ids) for one in found] == lengths
    assert begun == sorted(lengths, reverse=True)
    assert max(most) == 2


def test_seeds_follow_the_order_of_the_prompts() -> None:
    def first_tokens(lengths: tuple[int, ...]) -> list[int]:
        params = [
            SamplingParams(temperature=1.5, max_tokens=length, ignore_eos=True)
            for length in lengths
        ]
        with open_llm(seed=1) as engine:
            found = engine.generate(["x"] * len(params), params, use_tqdm=False)
        return [one.outputs[0].token_ids[0] for one in found]

    ascending = first_tokens((1, 2, 3, 4))
    assert len(set(ascending)) > 1
    assert first_tokens((4, 3, 2, 1)) == ascending


def test_continuations_of_one_prompt_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=16, ignore_eos=True)
    first, again = (llm.generate("import ", params, use_tqdm=False)[0] for _ in range(2))
    assert first.outputs == again.outputs
    assert len({completion.token_ids for completion in first.outputs}) == 3
    assert [completion.index for completion in first.outputs] == [0, 1, 2]


def test_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, stop=["\n"])
    (generation,) = llm.generate("def parse(text): return text", params, use_tqdm=False)
    (completion,) = generation.outputs
    assert "\n" not in completion.text
    assert completion.finish_reason is FinishReason.STOP
    assert completion.stop_reason == "\n"


def test_stream_gives_the_text_of_generate(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (generation,) = llm.generate("class Queue:\n", SAMPLED, use_tqdm=False)
    # The engine may be half of the tokens ahead of the reader.
    may_step = threading.Semaphore(12)
    hold_steps(llm, monkeypatch, lambda: may_step.acquire(timeout=60.0))
    pieces = []
    for piece in llm.stream("class Queue:\n", SAMPLED):
        pieces.append(piece)
        may_step.release(12)
    assert len(pieces) > 1
    assert "".join(pieces) == generation.outputs[0].text


def test_stream_takes_token_ids_of_an_iterator(llm: LLM) -> None:
    token_ids = llm.get_tokenizer().encode("class Queue:\n")
    given: Any = iter(token_ids)  # Any: no sequence, but accepted as one
    assert "".join(llm.stream(given, SAMPLED)) == "".join(llm.stream(token_ids, SAMPLED))


def test_stream_that_is_left_early_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream("class Queue:\n", SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    stream.close()
    tokens(llm, ["import"], SAMPLED)
    stats = llm.stats().scheduler
    assert stats.num_running == 0
    assert stats.num_free_blocks == stats.num_blocks


def test_stream_waits_until_the_queue_has_room(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = "".join(llm.stream("class Queue:\n", SAMPLED))
    engine = llm._engine
    assert isinstance(engine, EngineLoop)
    submit = engine.submit_request
    num_rejected = 0

    def submit_third(request: Request) -> None:
        nonlocal num_rejected
        if num_rejected < 2:
            num_rejected += 1
            raise OverloadedError("The queue is full.")
        submit(request)

    monkeypatch.setattr(engine, "submit_request", submit_third)
    assert "".join(llm.stream("class Queue:\n", SAMPLED)) == expected
    assert num_rejected == 2


def test_calls_do_not_take_each_others_tokens(llm: LLM) -> None:
    expected = "".join(llm.stream("class Queue:\n", SAMPLED))
    stream, other = llm.stream("class Queue:\n", SAMPLED), llm.stream("import os\n", SAMPLED)
    pieces = [next(stream)]
    next(other)
    assert tokens(llm, ["try:"], SAMPLED)[0]
    pieces += stream
    assert "".join(pieces) == expected
    assert list(other)


def test_chat_follows_the_template_and_stops(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What does Queue.put do?"}]
    (generation,) = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=200))
    assert generation.outputs[0].finish_reason is FinishReason.STOP
    assert "<|" not in generation.outputs[0].text


def test_first_requests_run_while_others_are_validated(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    validated = llm._validated
    parts: list[int] = []
    before = llm.stats().num_generated_tokens

    def after_the_first(prompts: Sequence[SampledPrompt]) -> list[Request]:
        deadline_s = time.monotonic() + 60
        while parts and llm.stats().num_generated_tokens < before + 24:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        parts.append(len(prompts))
        return validated(prompts)

    monkeypatch.setattr(llm, "_validated", after_the_first)
    prompts = [f"x{index} = " for index in range(30)]
    found = tokens(llm, prompts, SAMPLED)
    assert sum(parts) == 30
    assert len(parts) > 1
    monkeypatch.undo()
    assert found == tokens(llm, prompts, SAMPLED)


def test_requests_that_found_no_room_are_submitted_between_parts(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    validated = llm._validated
    num_generated: list[int] = []

    def once_idle(prompts: Sequence[SampledPrompt]) -> list[Request]:
        deadline_s = time.monotonic() + 60
        # The queue holds two requests, so that some of each part wait.
        while (stats := llm.stats().scheduler).num_running or stats.num_waiting:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        num_generated.append(llm.stats().num_generated_tokens)
        return validated(prompts)

    monkeypatch.setattr("cluster.llm.llm._FIRST_PART", 12)
    monkeypatch.setattr("cluster.llm.llm._LARGEST_PART", 1)
    monkeypatch.setattr(llm, "_validated", once_idle)
    tokens(llm, [f"x{index} = " for index in range(15)], SAMPLED)
    # Each part but the first begins when those before it have been submitted again.
    assert len(num_generated) == 4
    assert num_generated == sorted(set(num_generated))


def test_bad_prompt_far_behind_good_ones_ends_those_that_run(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
    engine = llm._engine
    assert isinstance(engine, EngineLoop)
    abort, has_aborted = engine.abort_request, threading.Event()

    def note_abort(request_id: str) -> None:
        abort(request_id)
        has_aborted.set()

    # However late the bad prompt is found, the others have not ended.
    monkeypatch.setattr(engine, "abort_request", note_abort)
    hold_steps(llm, monkeypatch, lambda: has_aborted.wait(60.0))
    before, started_s = llm.stats().num_generated_tokens, time.monotonic()
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.generate(["import os"] * 100 + [""], long, use_tqdm=False)
    while (stats := llm.stats().scheduler).num_running or stats.num_waiting:
        assert time.monotonic() < started_s + 60
        time.sleep(0.01)
    # None of those that had begun came to its end.
    assert llm.stats().num_generated_tokens - before < 900
    assert len(tokens(llm, ["import os"], SAMPLED)[0]) == 24


def test_bad_prompt_among_few_good_ones_starts_nothing(llm: LLM) -> None:
    before = llm.stats().num_prompt_tokens
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.generate(["import os", ""], SAMPLED, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="context"):
        llm.generate([[5] * 1024], SAMPLED, use_tqdm=False)
    assert llm.stats().num_prompt_tokens == before


def test_a_closed_llm_says_so() -> None:
    with open_llm() as llm:
        pass
    with pytest.raises(EngineError, match="LLM is closed"):
        llm.generate("import os", SAMPLED, use_tqdm=False)
    with pytest.raises(EngineError, match="LLM is closed"):
        next(llm.stream("import os", SAMPLED))


def test_requests_that_run_when_it_is_closed_say_so() -> None:
    with open_llm() as llm:
        stream = llm.stream("import os", SamplingParams(max_tokens=900, ignore_eos=True))
        next(stream)
        llm.close()
        with pytest.raises(EngineError, match="LLM is closed"):
            list(stream)


SCHEMA = '{"type": "array", "items": {"type": "integer"}, "minItems": 9}'
CASES: dict[str, dict[str, Any]] = {  # Any: fields of several types
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 5, "top_p": 0.9, "n": 2},
    "penalties": {"seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.7},
    # Of the two tokens of a word nearly alone.
    "bad words": {"seed": 5, "bad_words": ["self._"], "logit_bias": {291: 30.0, 349: 30.0}, "n": 4},
    "end of text": {"seed": 5, "ignore_eos": False, "min_tokens": 20},
    "structure": {"seed": 5, "structure": Structure(kind="json_schema", text=SCHEMA), "n": 2},
}


@pytest.fixture(scope="module")
def roomy_llm() -> Iterator[LLM]:
    with open_llm(num_blocks=256) as roomy_llm:
        yield roomy_llm


def tokens_of(roomy_llm: LLM, requests: Sequence[Request]) -> list[list[tuple[int, ...]]]:
    """Run requests; return the tokens that each sequence gained."""
    buffer = roomy_llm._sink.open_buffer(requests, is_watched=False)
    gained: dict[str, list[list[int]]] = {
        one.id: [[] for _ in range(one.sampling.n)] for one in requests
    }
    num_open = sum(len(one.open_indices) for one in requests)
    for one in requests:
        roomy_llm._open_engine.submit_request(one)
    while num_open:
        for event in buffer.take_events():
            gained[event.request_id][event.index] += event.token_ids
            num_open -= event.finish_reason is not None
    roomy_llm._sink.close_buffer(requests)
    return [[tuple(tokens) for tokens in gained[one.id]] for one in requests]


@pytest.mark.parametrize("sampling", CASES.values(), ids=CASES.keys())
def test_a_continued_request_has_the_same_tokens(roomy_llm: LLM, sampling: dict[str, Any]) -> None:
    params = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **sampling})
    (request,) = roomy_llm._validated(
        roomy_llm._requests.sample([SaltedPrompt("def read_config(path):\n")], params)
    )
    (whole,) = tokens_of(roomy_llm, [request])
    cuts = range(0, max(map(len, whole)), 9)
    continued = [
        msgspec.structs.replace(
            request,
            id=f"{request.id}-{cut}",
            # A sequence that was finished by then does not run.
            generated_token_ids=tuple(
                tokens[: cut + index] if cut + index < len(tokens) else None
                for index, tokens in enumerate(whole)
            ),
        )
        for cut in cuts
    ]
    for one, gained in zip(continued, tokens_of(roomy_llm, continued), strict=True):
        for begun, added, tokens in zip(one.generated_token_ids, gained, whole, strict=True):
            assert added == () if begun is None else (*begun, *added) == tokens
