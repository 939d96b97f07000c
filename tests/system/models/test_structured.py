"""Structured output matches its structure, however sequences are scheduled and batched."""

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from cluster.llm.llm import Completion, Generation
from pagedray import LLM, SamplingParams
from pagedray.errors import InvalidRequestError
from pagedray.request import FinishReason
from pagedray.sampling_params import Structure
from tests.small_models.scripted_model import write_scripted_model
from tests.system.engines import open_llm, rank_processes
from tests.system.server_process import TINY_LLAMA, ServerProcess

PROMPT = "Some things are"
SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 10, "maximum": 99},
        "names": {"type": "array", "items": {"enum": ["left", "right"]}, "maxItems": 3},
        "kind": {"anyOf": [{"const": "a"}, {"type": "null"}]},
    },
    "required": ["id", "names", "kind"],
}
REGEX = r"[a-f]{2,6}-(?:\d{3}|none)\."
OPTIONS: dict[str, Any] = {  # Any: options of any type
    "device": "cpu",
    # In bfloat16 some tokens depend on the number of rows of a step.
    "dtype": "float32",
    "num_threads": 1,
    "show_progress": False,
    "max_model_len": 512,
    # Sufficient on a busy machine.
    "structure_compile_s": 20.0,
}
CHOICES = ["north", "north east", "south"]
TAG = {
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "Say "},
            {
                "type": "tags_with_separator",
                "separator": ",",
                "at_least_one": True,
                "stop_after_first": True,
                "tags": [
                    {
                        "begin": "<n>",
                        "content": {
                            "type": "json_schema",
                            "json_schema": {"type": "integer", "minimum": 1, "maximum": 9},
                        },
                        "end": "</n>",
                    },
                    {
                        "begin": "<w>",
                        "content": {"type": "regex", "pattern": "left|right"},
                        "end": "</w>",
                    },
                ],
            },
            {"type": "const_string", "value": "!"},
        ],
    }
}
GRAMMAR = 'root ::= "(" ("x" | root)? ")"'


def is_balanced(text: str) -> bool:
    while "()" in text or "(x)" in text:
        text = text.replace("(x)", "").replace("()", "")
    return text == ""


def holds(structure: Structure, text: str) -> bool:
    """Return whether a text matches a structure, by independent checks."""
    match structure.kind:
        case "json_schema":
            jsonschema.validate(json.loads(text), json.loads(structure.text))
            return True
        case "json_object":
            return isinstance(json.loads(text), dict)
        case "regex":
            return re.fullmatch(structure.text, text) is not None
        case "choice":
            return text in json.loads(structure.text)
        case "structural_tag":
            return re.fullmatch(r"Say (<n>[1-9]</n>|<w>(left|right)</w>)!", text) is not None
    return is_balanced(text)


STRUCTURES = [
    Structure(kind="json_schema", text=json.dumps(SCHEMA)),
    Structure(kind="regex", text=REGEX),
    Structure(kind="choice", text=json.dumps(CHOICES)),
    Structure(kind="grammar", text=GRAMMAR),
    Structure(kind="json_object"),
    Structure(kind="structural_tag", text=json.dumps(TAG)),
]


def params_of(structure: Structure | None, **changes: Any) -> SamplingParams:  # Any: any field
    fields: dict[str, Any] = {"max_tokens": 120, "temperature": 1.5, "seed": 3}
    return SamplingParams(structure=structure, **(fields | changes))


def local_llm(**options: Any) -> LLM:  # Any: engine options of any type
    return open_llm(**OPTIONS | options)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with local_llm() as llm:
        yield llm


def completions(generations: list[Generation]) -> list[Completion]:
    return [completion for one in generations for completion in one.outputs]


def check(structure: Structure, completion: Completion) -> bool:
    """Check a continuation; return whether it finished."""
    assert completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    if completion.finish_reason is FinishReason.LENGTH:
        return False
    assert holds(structure, completion.text), completion.text
    return True


def check_all(llm: LLM, **changes: Any) -> list[Completion]:  # Any: any sampling parameter
    """Generate for all structures and one request without; return the completions."""
    given = [*STRUCTURES, None]
    generations = llm.generate(
        [PROMPT] * len(given), [params_of(s, **changes) for s in given], use_tqdm=False
    )
    num_ended = 0
    for structure, generation in zip(given, generations, strict=True):
        for completion in generation.outputs:
            if structure is not None:
                num_ended += check(structure, completion)
    assert num_ended >= 3
    return completions(generations)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_structures_hold(llm: LLM, temperature: float) -> None:
    check_all(llm, temperature=temperature, n=1 if temperature == 0.0 else 3)


def test_a_stream_holds(llm: LLM) -> None:
    text = "".join(llm.stream(PROMPT, params_of(STRUCTURES[0])))
    assert holds(STRUCTURES[0], text)


def test_masks_override_penalties_bias_and_logprobs(llm: LLM) -> None:
    ids = range(300, 500)
    params = params_of(
        STRUCTURES[1],
        logit_bias=dict.fromkeys(ids, 100.0),
        frequency_penalty=2.0,
        repetition_penalty=5.0,
        logprobs=2,
        top_p=0.9,
    )
    (completion,) = completions(llm.generate([PROMPT], params, use_tqdm=False))
    assert check(STRUCTURES[1], completion)
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)


def test_a_grammar_may_end_before_min_tokens(llm: LLM) -> None:
    params = params_of(STRUCTURES[2], min_tokens=50)
    (completion,) = completions(llm.generate([PROMPT], params, use_tqdm=False))
    assert check(STRUCTURES[2], completion)
    # It continues where the grammar allows it.
    params = params_of(Structure(kind="regex", text="(?:ab)*"), min_tokens=50)
    (completion,) = completions(llm.generate([PROMPT], params, use_tqdm=False))
    assert len(completion.token_ids) > 50


def test_a_finished_grammar_ends_a_sequence_with_ignore_eos(llm: LLM) -> None:
    params = params_of(Structure(kind="regex", text="a{7}"), ignore_eos=True)
    (completion,) = completions(llm.generate([PROMPT], params, use_tqdm=False))
    assert completion.text == "aaaaaaa"
    assert completion.finish_reason is FinishReason.STOP


def test_masks_do_not_change_the_tokens_of_other_sequences(llm: LLM) -> None:
    plain = [params_of(None, seed=seed, temperature=t) for seed, t in [(1, 0.0), (2, 1.5)]]
    alone = llm.generate([PROMPT] * 2, plain, use_tqdm=False)
    mixed = [*map(params_of, STRUCTURES), *plain]
    beside = llm.generate([PROMPT] * len(mixed), mixed, use_tqdm=False)[-len(plain) :]
    assert [c.token_ids for c in completions(beside)] == [c.token_ids for c in completions(alone)]


def test_chunks_and_preemption_change_nothing(llm: LLM) -> None:
    undisturbed = check_all(llm, n=2)
    for preemption in ("swap", "recompute"):
        with local_llm(
            block_size=4,
            num_blocks=52,
            num_cpu_blocks=200,
            max_model_len=200,
            max_num_batched_tokens=7,
            preemption=preemption,
            enable_prefix_cache=False,
        ) as small:
            disturbed = check_all(small, n=2)
            stats = small.stats().scheduler
        assert stats.num_swap_preemptions + stats.num_recompute_preemptions > 0
        assert [c.token_ids for c in disturbed] == [c.token_ids for c in undisturbed]


@pytest.mark.slow
def test_two_ranks_and_the_death_of_one_change_nothing(ray_cluster: None) -> None:
    long = Structure(kind="regex", text=r"(?:[a-z]{1,8} )*\.")
    structures = [STRUCTURES[0], long]
    params = [params_of(s, min_tokens=60, max_tokens=80) for s in structures]
    prompts = [PROMPT] * len(params)
    with LLM(
        TINY_LLAMA,
        tensor_parallel_size=2,
        enable_prefix_cache=False,
        **OPTIONS,
    ) as llm:
        undisturbed = completions(llm.generate(prompts, params, use_tqdm=False))
        for structure, completion in zip(structures, undisturbed, strict=True):
            check(structure, completion)
        before = llm.stats().num_generated_tokens
        victim = rank_processes()[-1]
        is_over, was_killed = threading.Event(), threading.Event()

        def kill() -> None:
            while not is_over.wait(0.002):
                if llm.stats().num_generated_tokens >= before + 20:
                    victim.kill()
                    was_killed.set()
                    return

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            disturbed = completions(llm.generate(prompts, params, use_tqdm=False))
        finally:
            is_over.set()
            killer.join()
        assert was_killed.is_set()
        assert [c.token_ids for c in disturbed] == [c.token_ids for c in undisturbed]


@pytest.mark.parametrize(
    "structure",
    [
        Structure(kind="regex", text="(?=a)"),
        Structure(kind="json_schema", text="{"),
        Structure(kind="json_schema", text='{"type": "array", "contains": {}}'),
        Structure(kind="choice", text="[]"),
        Structure(kind="grammar", text="root ::= missing"),
        Structure(kind="regex", text="a" * 5000),
        Structure(kind="grammar", text="a" * 70000),
    ],
)
def test_an_invalid_structure_is_rejected(llm: LLM, structure: Structure) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate([PROMPT], params_of(structure), use_tqdm=False)
    assert caught.value.param == "structure"


_FLAGS = ("--executor=local", "--dtype=float32", "--max-model-len=2048", "--num-blocks=256")
_TURNS = {
    "hermes": (
        "I look.",
        '\n<tool_call>\n{"name": "look", "arguments": ',
        '{"a": "x"}}',
        "\n</tool_call>",
    ),
    "pythonic": ("[look(", 'a="x"', " ) ]"),
    "qwen3_coder": (
        "I look.",
        "\n<tool_call>\n<function=look>\n<parameter=a>\n",
        "not a number",
        "\n</parameter>\n</function>\n</tool_call>",
    ),
}
_PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(
    scope="module",
    params=[
        "hermes",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("pythonic", "qwen3_coder")),
    ],
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServerProcess, str | None]]:
    """A server, and the text that its model writes before the call."""
    folder = tmp_path_factory.mktemp("model") / "scripted"
    folder.mkdir()
    write_scripted_model(folder, [_TURNS[request.param]])
    flags = (*_FLAGS, f"--tool-call-format={request.param}")
    with ServerProcess(flags, folder) as server:
        yield server, "I look." if "I look." in _TURNS[request.param] else None


@pytest.mark.parametrize("is_strict", [False, True])
def test_arguments_are_valid_if_the_tool_is_strict(
    server: tuple[ServerProcess, str | None], *, is_strict: bool
) -> None:
    process, content = server
    function = {"name": "look", "strict": is_strict, "parameters": _PARAMETERS}
    body = {
        "model": "scripted",
        "messages": [{"role": "user", "content": "Look."}],
        "temperature": 0,
        "max_tokens": 100,
        "tools": [{"type": "function", "function": function}],
    }
    answer = httpx.post(f"{process.url}/v1/chat/completions", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    assert choice["message"]["content"] == content
    (call,) = choice["message"]["tool_calls"]
    found = json.loads(call["function"]["arguments"])["a"]
    assert (found in range(1, 100)) is is_strict, found
    assert choice["finish_reason"] == "tool_calls"
