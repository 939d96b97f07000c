"""Drafters of tests, parameters of every kind, and an engine that verifies every draft."""

from __future__ import annotations

import json
import random
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree
from typing import TYPE_CHECKING, Any, Literal

from cluster.engine.engine_loop import MaskPatience
from cluster.scheduling.drafters import Drafter, NgramDrafter
from cluster.scheduling.speculation import Chain, Speculator
from cluster.scheduling.suffix_decoding import SuffixDrafter
from cluster.serving.tools.tool import Tool
from cluster.serving.tools.tool_choice import ToolChoice, ToolUse
from pagedray import LLM, SamplingParams
from pagedray.config import SpeculationConfig
from pagedray.sampling_params import Structure
from tests.scheduling.drafting import FreeDrafts

if TYPE_CHECKING:
    from cluster.scheduling.sequence import Sequence as ScheduledSequence
    from pagedray.batch import StepPlan

TINY_LLAMA = Path(__file__).parents[2] / "examples" / "tiny-llama"
TINY_MTP = TINY_LLAMA.with_name("tiny-llama-mtp")
VOCAB_SIZE = 2048
NUM_DRAFTS = 5
_TEXT = """Return the median (middle value) of numeric data.

    When the number of data points is odd, return the middle data point.
    When the number of data points is even, the median is interpolated by
    taking the average of the two middle values:
"""
PROMPTS = [
    _TEXT + "    >>> median([1, 3, 5])\n    3\n    >>> median(",
    _TEXT + "def median(data):\n    data = sorted(data)\n    n = len(data)\n    if n == 0:\n",
    "The list of values is sorted in",
]
PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy without end": {"temperature": 0.0, "ignore_eos": True},
    "one token": {"temperature": 0.0, "max_tokens": 1},
    "two tokens": {"temperature": 0.0, "max_tokens": 2},
    "temperature": {"temperature": 0.7},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k": {"temperature": 0.8, "top_k": 20},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "penalties": {
        "temperature": 0.5,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.05,
    },
    "bad words": {"temperature": 0.0, "bad_words": ["the", " of the", "data", " a list"]},
    "bias": {"temperature": 0.3, "logit_bias": {9: 3.0, 20: -100.0}},
    "allowed tokens": {"temperature": 0.9, "allowed_token_ids": list(range(5, 40))},
    "min_tokens": {"temperature": 0.3, "min_tokens": 20, "stop_token_ids": [10, 11, 12, 13]},
    "logprobs": {"temperature": 0.7, "logprobs": 3},
    "prompt_logprobs": {"temperature": 0.0, "logprobs": 1, "prompt_logprobs": 1},
    "n": {"temperature": 0.6, "n": 3},
    "stop strings": {"temperature": 0.0, "stop": [" the ", "\n\n", "):"]},
    "long stop string": {"temperature": 0.5, "stop": ["the first"], "logprobs": 0},
}
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "values": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "kind": {"enum": ["mean", "median", None]},
    },
    "required": ["name", "values", "kind"],
    "additionalProperties": False,
}
_TOOLS = [
    Tool(name=name, parameters=_SCHEMA, is_strict=is_strict)
    for name, is_strict in (("look", True), ("look_again", True), ("other", False))
]


def _calls(kind: Literal["auto", "required"]) -> Structure:
    """Return the structure of a turn that may, or must, call tools with arguments."""
    use = ToolUse(_TOOLS, ToolChoice(kind=kind), tool_format="hermes")
    structure = use.structure(None, None)
    assert structure is not None
    return structure


_JSON = Structure(kind="json_schema", text=json.dumps(_SCHEMA))
_WORDS = Structure(kind="regex", text="[a-z ]{30}")
MASKED: dict[str, dict[str, Any]] = {
    "regex": {"temperature": 0.4, "structure": _WORDS},
    "regex without end": {"temperature": 0.4, "structure": _WORDS, "ignore_eos": True},
    "short regex, min_tokens": {
        "temperature": 0.8,
        "structure": Structure(kind="regex", text="[a-z ]{1,40}"),
        "min_tokens": 9,
    },
    "grammar": {
        "temperature": 1.0,
        "structure": Structure(kind="grammar", text='root ::= ("(" [a-c]* root? ")")+'),
    },
    "schema, greedy": {"temperature": 0.0, "structure": _JSON, "max_tokens": 60},
    "schema": {"temperature": 0.8, "structure": _JSON, "max_tokens": 60, "n": 2},
    "schema, filters": {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "structure": _JSON},
    "schema, penalties": {
        "temperature": 0.8,
        "structure": _JSON,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.1,
    },
    "schema, logprobs and echo": {
        "temperature": 0.5,
        "structure": _JSON,
        "logprobs": 2,
        "prompt_logprobs": 1,
    },
    "schema, stop": {"temperature": 0.5, "structure": _JSON, "stop": ['"values"', "]"]},
    "tools": {"temperature": 0.0, "structure": _calls("auto"), "max_tokens": 60},
    "tools, required": {"temperature": 0.7, "structure": _calls("required"), "max_tokens": 60},
}
PARAMETERS |= MASKED
_CALL = (
    '<tool_call>\n{"name": "look", "arguments": {"name": "a", "values": [1, 2, 3], '
    '"kind": "median"}}\n</tool_call>\n'
)
_OWN_PROMPTS = {"tools": [_CALL * 4, _CALL * 3 + "<tool_call>", "<tool_call>"]}
CHATS: dict[str, dict[str, Any]] = {
    "reasoning budget": {"temperature": 0.7, "thinking_token_budget": 7},
    "spent budget": {"temperature": 0.0, "thinking_token_budget": 0},
    "reasoning and schema": {
        "temperature": 0.6,
        "thinking_token_budget": 9,
        "structure": _JSON,
        "max_tokens": 50,
    },
    "reasoning and tools": {
        "temperature": 0.6,
        "thinking_token_budget": 4,
        "structure": _calls("required"),
        "max_tokens": 50,
    },
}
"""Parameters of conversations with a model that reasons."""
_THINKING_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}<think>\n"


def write_thinking_model(folder: Path) -> Path:
    """Write a tiny model with a chat template that begins its reasoning; return its folder."""
    copytree(TINY_LLAMA, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": _THINKING_TEMPLATE + "{# </think> #}"})
    )
    return folder


class Patient(MaskPatience):
    """Waits for all masks: a token that is computed again may have other last bits."""

    def wait_s(self, *, delays_others: bool) -> float:
        return 60.0


class RandomDrafter:
    """Guesses any tokens."""

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        self._vocab_size = vocab_size
        self._rng = random.Random(7)

    def propose(self, sequence: ScheduledSequence, limit: int) -> Sequence[int]:
        number = self._rng.randrange(limit + 1)
        return [self._rng.randrange(self._vocab_size) for _ in range(number)]


class OracleDrafter:
    """Knows the tokens of sequences, and guesses some wrong."""

    def __init__(
        self,
        known: Sequence[Sequence[int]],
        *,
        wrong: float = 0.0,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        """`known` are whole sequences, prompts included."""
        self._vocab_size = vocab_size
        self._known = [tuple(one) for one in known]
        self._wrong = wrong
        self._rng = random.Random(8)

    def propose(self, sequence: ScheduledSequence, limit: int) -> Sequence[int]:
        tokens = tuple(sequence.token_ids)
        for known in self._known:
            if known[: len(tokens)] == tokens:
                drafts = known[len(tokens) : len(tokens) + limit]
                return [
                    self._rng.randrange(self._vocab_size)
                    if self._rng.random() < self._wrong
                    else one
                    for one in drafts
                ]
        return ()


def suffixes() -> SuffixDrafter:
    """Return a drafter of suffix decoding that guesses many tokens."""
    return SuffixDrafter(
        SpeculationConfig(
            method="suffix", num_speculative_tokens=NUM_DRAFTS, suffix_decoding_max_spec_factor=3.0
        )
    )


def ngrams() -> Drafter:
    return NgramDrafter(shortest=1, longest=3)


@contextmanager
def open_llm(
    *,
    speculates: bool,
    model: Path = TINY_LLAMA,
    head: Path | None = None,
    method: str = "ngram",
    **options: Any,  # Any: options of any type
) -> Iterator[LLM]:
    """Open an engine in this process, by default; drafts may come from a draft head."""
    source = {"method": method} if head is None else {"model": str(head)}
    config = {**source, "num_speculative_tokens": NUM_DRAFTS}
    # Any: options of any type
    given: dict[str, Any] = {"executor": "local", "num_threads": 1, "device": "cpu"} | options
    with LLM(
        model,
        show_progress=False,
        # Sufficient on a busy machine.
        structure_compile_s=20.0,
        speculative_config=config if speculates else None,
        **given,
    ) as llm:
        llm._engine._mask_patience = Patient()
        if speculates:
            speculator = speculator_of(llm)
            speculator.times = FreeDrafts()
        yield llm


def speculator_of(llm: LLM) -> Speculator:
    speculator = llm._engine._scheduler._speculator
    assert speculator is not None
    return speculator


@contextmanager
def counted_overlaps(llm: LLM) -> Iterator[Counter[str]]:
    """Count the plans of an engine that are made before the tokens of the step before are known."""
    executor, counts = llm._engine._executor, Counter[str]()
    submit = executor.submit_plan

    def counting(plan: StepPlan) -> None:
        if plan.is_overlapped:
            num_rows = len({*array("i", plan.decodes.rows)})
            counts["plans"] += 1
            counts["drafts"] += len(plan.decodes) - num_rows
        submit(plan)

    executor.submit_plan = counting  # type: ignore[method-assign]  # counts what it passes on
    yield counts
    executor.submit_plan = submit  # type: ignore[method-assign]  # as before


def noted_chains(llm: LLM) -> list[tuple[Chain, int]]:
    """Return a list of the chains of later steps, with the numbers of their right drafts."""
    speculator, noted = speculator_of(llm), list[tuple[Chain, int]]()
    note_chain = speculator.note_chain

    def note(chain: Chain, num_accepted: int) -> None:
        noted.append((chain, num_accepted))
        note_chain(chain, num_accepted)

    speculator.note_chain = note  # type: ignore[method-assign]  # notes chains
    return noted


def answers(llm: LLM, names: Sequence[str], *, max_tokens: int = 24) -> list[list[Any]]:
    """Return all that a client sees of the completions with these parameters, by prompt."""
    prompts, params, chat_params = [], [], []
    for seed, name in enumerate(names):
        fields = {"max_tokens": max_tokens, **(CHATS.get(name) or PARAMETERS[name])}
        for prompt in _OWN_PROMPTS.get(name, PROMPTS):
            given = SamplingParams(**fields, seed=seed)
            if name in CHATS:
                chat_params.append(given)
            else:
                prompts.append(prompt)
                params.append(given)
    generations = llm.generate(prompts, params, use_tqdm=False)
    if chat_params:
        conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        given_chats = conversations * (len(chat_params) // len(PROMPTS))
        generations += llm.chat(given_chats, chat_params, use_tqdm=False)
    return [[one.prompt_token_ids, one.prompt_logprobs, one.outputs] for one in generations]


def sequences_of(found: Sequence[Sequence[Any]]) -> list[list[int]]:
    """Return the tokens of completions, behind their prompts."""
    return [
        [*prompt, *completion.token_ids] for prompt, _, outputs in found for completion in outputs
    ]
