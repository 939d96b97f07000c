"""Answers with drafts that equal answers without, beside answers of another batch size.

    python -m bench.draft_equality --output bench/results/draft_equality.json

On a GPU, kernels add up in another order in another batch, so a token changes where two tokens are
almost equally likely, with drafts or without. Each way gives 128 answers of up to 96 tokens,
greedily and at a temperature of 0.8, which are compared with the answers of 128 requests at once.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from shutil import copy, copytree
from typing import TYPE_CHECKING, Any, TypeAlias

from bench.engine import write_results
from pagedray import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

_Answers: TypeAlias = "dict[str, tuple[list[list[int]], float]]"
"""The tokens of the answers, and the tokens of a chain, by sampling."""
_EXAMPLES = Path(__file__).parents[1] / "examples"
_DOCS = _EXAMPLES.parent / "docs"
_NUM_PROMPTS = 128
_NUM_PROMPT_CHARACTERS = 400
_SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=96),
    "temperature": SamplingParams(temperature=0.8, max_tokens=96, seed=11),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to compute the answers."""

    way: str
    sampling: str
    equal_answers: float
    equal_tokens: float
    """Tokens before the first that differs, of all tokens."""
    mean_length: float
    """Tokens of a chain; 1 without drafts."""


def main() -> None:
    """Compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    text = "".join(path.read_text() for path in sorted(_DOCS.glob("*.md")))
    step = (len(text) - _NUM_PROMPT_CHARACTERS) // _NUM_PROMPTS
    firsts = range(0, step * _NUM_PROMPTS, step)
    prompts = [text[first : first + _NUM_PROMPT_CHARACTERS] for first in firsts]
    plain = _EXAMPLES / "tiny-llama"
    expected = _answers(plain, prompts, options, max_num_seqs=_NUM_PROMPTS)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        # The same weights, with a layer that drafts.
        copytree(_EXAMPLES / "tiny-llama-mtp", folder, dirs_exist_ok=True)
        copy(plain / "model.safetensors", Path(folder) / "model-00001-of-00002.safetensors")
        for path in plain.glob("*.json"):
            if path.name != "config.json":
                copy(path, folder)
        for way, (model, engine_options) in _ways(plain, Path(folder)).items():
            answers = _answers(model, prompts, options, **engine_options)
            rows += list(_rows(way, expected, answers))
    if options.output:
        write_results(options.output, "tiny-llama", rows=rows)


def _ways(plain: Path, with_mtp: Path) -> dict[str, tuple[Path, dict[str, Any]]]:  # Any: options
    """Return the model and the options of each way."""
    head = str(_EXAMPLES / "tiny-llama-eagle3")
    drafters: dict[str, tuple[Path, dict[str, Any]]] = {
        "ngram": (plain, {}),
        "suffix": (plain, {}),
        "eagle3": (plain, {"model": head}),
        "mtp": (with_mtp, {}),
    }
    numbers = {"the same again": _NUM_PROMPTS, "40 at once": 40, "8 at once": 8}
    ways: dict[str, tuple[Path, dict[str, Any]]] = {
        way: (plain, {"max_num_seqs": number}) for way, number in numbers.items()
    }
    for method, (model, config) in drafters.items():
        config |= {"method": method, "num_speculative_tokens": 4}
        ways[method] = model, {"max_num_seqs": 2 * _NUM_PROMPTS, "speculative_config": config}
    return ways


def _rows(way: str, expected: _Answers, answers: _Answers) -> Iterator[Row]:
    for sampling, (found, mean_length) in answers.items():
        pairs = list(zip(expected[sampling][0], found, strict=True))
        num_equal = sum(_num_equal(*pair) for pair in pairs)
        row = Row(
            way=way,
            sampling=sampling,
            equal_answers=round(sum(one == other for one, other in pairs) / len(pairs), 4),
            equal_tokens=round(num_equal / sum(len(one) for one, _ in pairs), 4),
            mean_length=round(mean_length, 3),
        )
        print(row, flush=True)
        yield row


def _answers(
    folder: Path,
    prompts: list[str],
    options: argparse.Namespace,
    **engine_options: Any,  # Any: options of any type
) -> _Answers:
    found: _Answers = {}
    with LLM(
        str(folder),
        executor="local",
        dtype=options.dtype,
        show_progress=False,
        enable_prefix_cache=False,
        **engine_options,
    ) as llm:
        num_accepted = num_chains = 0
        for name, sampling in _SAMPLING.items():
            generations = llm.generate(prompts, sampling, use_tqdm=False)
            stats = llm.stats().scheduler.speculation
            more = stats.num_accepted_tokens - num_accepted
            mean_length = 1 + more / max(stats.num_chains - num_chains, 1)
            num_accepted, num_chains = stats.num_accepted_tokens, stats.num_chains
            found[name] = [list(one.outputs[0].token_ids) for one in generations], mean_length
    return found


def _num_equal(expected: list[int], found: list[int]) -> int:
    """Return the number of tokens before the first that differs."""
    pairs = enumerate(zip(expected, found, strict=False))
    shorter = min(len(expected), len(found))
    return next((place for place, pair in pairs if pair[0] != pair[1]), shorter)


if __name__ == "__main__":
    main()
