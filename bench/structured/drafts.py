"""Structured output with and without speculation, on examples/tiny-llama and a CPU.

    python -m bench.structured.drafts --output bench/results/structured_drafts.json

Requests follow JSON schemas, seeded, `--batch-size` at a time, with room for drafts beside them.
Each text that ended is validated, and compared with the text without drafts. Rounds alternate, and
the fastest of each kind counts.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import jsonschema

from bench.records.command import command_and_date
from bench.records.machine import cpu_name
from pagedray import LLM, SamplingParams
from pagedray.request import FinishReason
from pagedray.sampling_params import Structure

_MODEL = Path(__file__).parents[2] / "examples" / "tiny-llama"
_WORD = {"type": "string", "maxLength": 12}
_POINT = {
    "type": "object",
    "properties": {"latitude": {"type": "number"}, "longitude": {"type": "number"}},
    "required": ["latitude", "longitude"],
}
_SCHEMAS: dict[str, dict[str, Any]] = {  # Any: JSON
    "person": {
        "type": "object",
        "properties": {
            "first_name": _WORD,
            "last_name": _WORD,
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "is_member": {"type": "boolean"},
        },
        "required": ["first_name", "last_name", "age", "is_member"],
    },
    "places": {
        "type": "object",
        "properties": {
            "places": {"type": "array", "items": _POINT, "minItems": 2, "maxItems": 4},
            "category": {"enum": ["restaurant", "station", "museum"]},
        },
        "required": ["places", "category"],
    },
    "call": {
        "type": "object",
        "properties": {
            "function": {"const": "search_documents"},
            "arguments": {
                "type": "object",
                "properties": {"query": _WORD, "max_results": {"enum": [10, 20, 50]}},
                "required": ["query", "max_results"],
            },
        },
        "required": ["function", "arguments"],
    },
}
_PROMPTS = {
    "person": "Return a person as JSON, with first_name, last_name, age and is_member: ",
    "places": "Return places as JSON, with latitude and longitude, and their category: ",
    "call": 'Call search_documents: {"function": "search_documents", "arguments": ',
}


def main() -> int:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.structured.drafts", description="Structured output with drafts."
    )
    parser.add_argument("--num-requests", type=int, default=2000)
    parser.add_argument("--num-drafts", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--num-rounds", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    runs: dict[str, dict[str, Any]] = {}  # Any: numbers
    texts: dict[str, list[tuple[str, FinishReason | None]]] = {}
    config = {"method": "ngram", "num_speculative_tokens": options.num_drafts}
    for _ in range(options.num_rounds):
        for name, speculation in (("plain", None), ("n-grams", config)):
            run, texts[name] = _run(options.num_requests, options.batch_size, speculation)
            if name not in runs or run["tokens_per_s"] > runs[name]["tokens_per_s"]:
                runs[name] = run
            print(name, run)
    pairs = zip(*texts.values(), strict=True)
    report = {
        **command_and_date(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "num_requests": options.num_requests,
        "batch_size": options.batch_size,
        "num_different": sum(plain != drafted for plain, drafted in pairs),
        **{name: run | _checked(texts[name]) for name, run in runs.items()},
    }
    print(json.dumps(report, indent=1))
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _kind_of(number: int) -> str:
    return list(_SCHEMAS)[number % len(_SCHEMAS)]


def _run(
    num_requests: int,
    batch_size: int,
    speculation: dict[str, Any] | None,  # Any: a value of any type
) -> tuple[dict[str, Any], list[tuple[str, FinishReason | None]]]:
    """Return figures of a run, and the text and the end of each request."""
    with LLM(
        _MODEL,
        executor="local",
        device="cpu",
        num_threads=1,
        dtype="float32",
        max_num_seqs=128,
        show_progress=False,
        structure_compile_s=20.0,
        speculative_config=speculation,
    ) as llm:
        _generate(llm, range(2 * len(_SCHEMAS)))
        before = llm.stats()
        began_s = time.perf_counter()
        completions = [
            completion
            for first in range(0, num_requests, batch_size)
            for completion in _generate(llm, range(first, min(first + batch_size, num_requests)))
        ]
        seconds = time.perf_counter() - began_s
        after = llm.stats()
    num_tokens = sum(len(one.token_ids) for one in completions)
    spent = after.scheduler.speculation
    figures = {
        "tokens_per_s": round(num_tokens / seconds),
        "num_tokens": num_tokens,
        "num_steps": after.num_steps - before.num_steps,
        "num_draft_tokens": spent.num_draft_tokens,
        "num_accepted_tokens": spent.num_accepted_tokens,
    }
    return figures, [(one.text, one.finish_reason) for one in completions]


def _generate(llm: LLM, numbers: range) -> list[Any]:  # Any: completions
    given = [_kind_of(number) for number in numbers]
    params = [
        SamplingParams(
            max_tokens=200,
            temperature=0.7,
            seed=number,
            structure=Structure(kind="json_schema", text=json.dumps(_SCHEMAS[kind])),
        )
        for number, kind in zip(numbers, given, strict=True)
    ]
    generations = llm.generate([_PROMPTS[kind] for kind in given], params, use_tqdm=False)
    return [one.outputs[0] for one in generations]


def _checked(texts: list[tuple[str, FinishReason | None]]) -> dict[str, int]:
    """Return how many texts are valid, are not, and reached the maximum of tokens."""
    found = {"num_valid": 0, "num_invalid": 0, "num_cut": 0}
    for number, (text, reason) in enumerate(texts):
        if reason is FinishReason.LENGTH:
            found["num_cut"] += 1
            continue
        try:
            jsonschema.validate(json.loads(text), _SCHEMAS[_kind_of(number)])
            found["num_valid"] += 1
        except (ValueError, jsonschema.ValidationError):
            found["num_invalid"] += 1
    return found


if __name__ == "__main__":
    raise SystemExit(main())
