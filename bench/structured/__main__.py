"""The cost of structured output, for requests with and without it.

    python -m bench.structured --output bench/results/structured.json

With a vocabulary of 128 256 tokens, which are those of examples/tiny-llama and pairs of them, and
64 sequences:

- masks: the time to make the masks of a step, for sequences at random places of a grammar.
- steps: the time between two steps of the controller, over ranks whose forward pass takes 15 ms, as
  a model of 8 billion parameters does on a GPU. Some of the sequences follow a grammar. A rank
  samples when its forward pass is done and it has its masks.
- compilations: the time to compile strings of limited length, on a server that has just started and
  after its warm-up.
- first request: the duration of a server's first structured request, and the longest time that its
  event loop is blocked meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.controller import simulated_config
from bench.records.command import command_and_date
from bench.records.machine import cpu_name
from bench.structured.timed_engine import EOS_TOKEN_ID, EndlessSink, TimedExecutor, pick_token
from cluster.engine.engine_loop import EngineLoop
from cluster.engine.engine_options import EngineOptions, engine_config
from cluster.serving.inputs import GenerationInput
from cluster.serving.text.tokenizer import Tokenizer
from cluster.serving.validator import Validator
from cluster.structured.compiler import StructureCompiler
from cluster.structured.messages import CompileLimits
from cluster.structured.token_matchers import Vocabulary, vocabulary_of
from pagedray.request import AskedMasks, Request
from pagedray.sampling_params import SamplingParams, Structure

if TYPE_CHECKING:
    from cluster.structured.mask_client import CompiledGrammar

_MODEL = Path(__file__).parents[2] / "examples" / "tiny-llama"
_SCHEMA = json.dumps(
    {
        "type": "object",
        "required": ["name", "age", "tags"],
        "properties": {
            "name": {"type": "string", "maxLength": 100},
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
    }
)
_STRUCTURES = {
    "json_object": Structure(kind="json_object"),
    "json_schema": Structure(kind="json_schema", text=_SCHEMA),
    "regex": Structure(kind="regex", text=r"(?:[a-z]+ )*\d{4}"),
}
_NUM_SEQUENCES = 64
_LEARNING_S = 10.0
_LIMITS = CompileLimits(compile_s=60.0, wait_s=120.0, mask_s=5.0)

Rows = list[dict[str, Any]]  # Any: names and numbers


def main() -> int:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.structured", description="Cost of structured output."
    )
    parser.add_argument("--vocab-size", type=int, default=128_256)
    parser.add_argument("--num-steps", type=int, default=200)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    vocabulary = _vocabulary(options.vocab_size)
    report: dict[str, Any] = {  # Any: JSON
        **command_and_date(),
        "python": platform.python_version(),
        "xgrammar": version("xgrammar"),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "vocab_size": options.vocab_size,
        "num_sequences": _NUM_SEQUENCES,
    }
    report["first_request"] = [_first_request(is_warm=False), _first_request(is_warm=True)]
    report["compilations"] = _compilations(vocabulary)
    compiler = StructureCompiler(lambda: vocabulary, limits=_LIMITS)
    try:
        grammars = {
            name: asyncio.run(compiler.compile(structure))
            for name, structure in _STRUCTURES.items()
        }
        report["masks"] = [_masks(name, grammars[name], options.num_steps) for name in grammars]
        report["steps"] = [_steps("none", None, 0, options.num_steps)]
        for name, number in itertools.product(grammars, (8, _NUM_SEQUENCES)):
            report["steps"].append(_steps(name, grammars[name], number, options.num_steps))
    finally:
        compiler.close()
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _vocabulary(size: int) -> Vocabulary:
    tokenizer = Tokenizer.from_folder(_MODEL)
    known = vocabulary_of(tokenizer.token_bytes, size=3072, eos_token_ids=(EOS_TOKEN_ID,)).tokens
    generator, tokens = random.Random(0), dict.fromkeys(known[261:])
    while len(tokens) < size - 261:
        tokens[generator.choice(known[261:]) + generator.choice(known[261:])] = None
    return Vocabulary(
        tokens=(*known[:261], *tokens), eos_token_ids=(EOS_TOKEN_ID,), special_token_ids={}
    )


def _first_request(*, is_warm: bool) -> dict[str, Any]:
    """Return the time of the first structured request, and the event loop's longest stall."""
    return asyncio.run(_timed_first_request(is_warm=is_warm))


async def _timed_first_request(*, is_warm: bool) -> dict[str, Any]:
    validator = Validator(
        engine_config(_MODEL, EngineOptions(device="cpu")), Tokenizer.from_folder(_MODEL)
    )
    if is_warm:
        validator.warm_up()
        await asyncio.sleep(5.0)
    gaps: list[float] = []

    async def beat() -> None:
        last_s = time.perf_counter()
        while True:
            await asyncio.sleep(0.002)
            gaps.append(time.perf_counter() - last_s - 0.002)
            last_s = time.perf_counter()

    beating = asyncio.create_task(beat())
    await asyncio.sleep(0.1)
    gaps.clear()
    began_s = time.perf_counter()
    given = GenerationInput(
        prompts=("x",), sampling={"structure": _STRUCTURES["json_schema"], "max_tokens": 5}
    )
    await validator.validate(given)
    took_s = time.perf_counter() - began_s
    await asyncio.sleep(0.1)
    beating.cancel()
    validator.close()
    row = {"is_warm": is_warm, "request_s": took_s, "longest_stall_ms": max(gaps) * 1e3}
    print(f"first request, warm {is_warm}: {took_s:.3f} s, longest stall {max(gaps) * 1e3:.1f} ms")
    return row


def _compilations(vocabulary: Vocabulary) -> Rows:
    cold = [_compilation(vocabulary, most, wait_s=0.0) for most in (100, 1000)]
    return cold + [_compilation(vocabulary, most, wait_s=_LEARNING_S) for most in (100, 4000)]


def _compilation(vocabulary: Vocabulary, most: int, *, wait_s: float) -> dict[str, Any]:
    compiler = StructureCompiler(lambda: vocabulary, limits=_LIMITS)
    asyncio.run(compiler.compile(Structure(kind="regex", text="a")))
    time.sleep(wait_s)
    text = json.dumps({"type": "string", "maxLength": most})
    began_s = time.perf_counter()
    asyncio.run(compiler.compile(Structure(kind="json_schema", text=text)))
    took_s = time.perf_counter() - began_s
    compiler.close()
    print(f"maxLength {most}, {wait_s:g} s after the start: {took_s:.2f} s")
    return {"max_length": most, "after_s": wait_s, "compile_s": took_s}


def _request(grammar: CompiledGrammar | None, max_tokens: int = 100_000) -> Request:
    return Request(
        id="r",
        prompt_token_ids=(7,),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        seed=0,
        eos_token_ids=(EOS_TOKEN_ID,),
        grammar=grammar,
    )


def _masks(name: str, grammar: CompiledGrammar, num_steps: int) -> dict[str, Any]:
    generator = random.Random(0)
    asked = [(grammar.matcher(_request(grammar)), [7]) for _ in range(_NUM_SEQUENCES)]
    times_s = []
    for _ in range(num_steps):
        started_s = time.perf_counter()
        given = [AskedMasks(matcher, token_ids) for matcher, token_ids in asked]
        masks = grammar.masks(given, num_awaited=len(given), wait_s=math.inf)
        times_s.append(time.perf_counter() - started_s)
        for index, mask in enumerate(masks):
            assert isinstance(mask, bytes), mask
            token_id = pick_token(np.frombuffer(mask, np.uint32), generator)
            if token_id == EOS_TOKEN_ID:
                # A sequence that has ended starts again.
                asked[index] = grammar.matcher(_request(grammar)), [7]
            else:
                asked[index][1].append(token_id)
    return {"structure": name, **_times(f"masks, {name}", times_s)}


def _steps(
    name: str, grammar: CompiledGrammar | None, num_structured: int, num_steps: int
) -> dict[str, Any]:
    executor, sink = TimedExecutor(), EndlessSink()
    config = simulated_config(vocab_size=128_256, max_num_seqs=_NUM_SEQUENCES, max_positions=8192)
    controller = sink.controller = EngineLoop(config, executor, sink)
    for index in range(_NUM_SEQUENCES):
        sink.submit(_request(grammar if index < num_structured else None))
    controller.start_steps()
    while len(executor.step_times) < num_steps + 10 and controller.error is None:
        time.sleep(0.05)
    assert controller.error is None
    controller.stop_steps()
    executor.close()
    ends = [when for when, _ in executor.step_times][10:]
    times = [after - before for before, after in itertools.pairwise(ends)]
    row = _times(f"steps, {num_structured} of {_NUM_SEQUENCES} with {name}", times)
    return {"structure": name, "num_structured": num_structured, **row}


def _times(what: str, times_s: list[float]) -> dict[str, float]:
    median_ms = statistics.median(times_s) * 1e3
    p90_ms = sorted(times_s)[len(times_s) * 9 // 10] * 1e3
    print(f"{what}: median {median_ms:.2f} ms, p90 {p90_ms:.2f} ms, of {len(times_s)}", flush=True)
    return {"median_ms": median_ms, "p90_ms": p90_ms}


if __name__ == "__main__":
    sys.exit(main())
