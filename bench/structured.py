"""What masks cost a step: 64 sequences that follow a grammar over a vocabulary of 128 256 tokens.

    python bench/structured.py

Times tokens taken and masks made, as the controller does it while the ranks run the forward pass.
The vocabulary is that of examples/tiny-llama and pairs of its tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from pathlib import Path

import numpy as np

from cluster.serving.tokenizer import Tokenizer
from cluster.structured.compiler import StructureCompiler
from cluster.structured.compiler_process import Limits
from cluster.structured.vocabulary import Vocabulary, vocabulary_of
from pagedray.request import FinishReason, Request, SamplingParams, Structure

_MODEL = Path(__file__).parents[1] / "examples" / "tiny-llama"
_SCHEMA = """{"type": "object", "required": ["name", "age", "tags"], "properties": {
"name": {"type": "string"}, "age": {"type": "integer"},
"tags": {"type": "array", "items": {"type": "string"}}}}"""


def main() -> None:
    """Print the time of a step's masks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-sequences", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=128_256)
    parser.add_argument("--num-steps", type=int, default=50)
    arguments = parser.parse_args()
    vocabulary = _vocabulary(arguments.vocab_size)
    compiler = StructureCompiler(
        lambda: vocabulary, limits=Limits(compile_s=30.0, wait_s=60.0, mask_s=5.0)
    )
    try:
        for structure in (
            Structure(kind="json_object"),
            Structure(kind="json_schema", text=_SCHEMA),
            Structure(kind="regex", text=r"(?:[a-z]+ )*\d{4}"),
        ):
            _measure(compiler, structure, arguments.num_sequences, arguments.num_steps)
    finally:
        compiler.close()


def _vocabulary(size: int) -> Vocabulary:
    tokenizer = Tokenizer.from_folder(_MODEL)
    known = vocabulary_of(tokenizer.token_bytes, size=3072, eos_token_ids=(0,)).tokens
    generator, tokens = random.Random(0), dict.fromkeys(known[261:])
    while len(tokens) < size - 261:
        tokens[generator.choice(known[261:]) + generator.choice(known[261:])] = None
    return Vocabulary(tokens=(*known[:261], *tokens), eos_token_ids=(0,))


def _measure(
    compiler: StructureCompiler, structure: Structure, num_sequences: int, num_steps: int
) -> None:
    grammar = asyncio.run(compiler.compile(structure))
    request = Request(
        id="r", prompt_token_ids=(7,), sampling=SamplingParams(), seed=0, eos_token_ids=(0,)
    )
    generator = random.Random(0)
    matchers = [grammar.matcher(request) for _ in range(num_sequences)]
    token_ids = [[7] for _ in matchers]
    times_s = []
    for _ in range(num_steps):
        started_s = time.perf_counter()
        masks = [m.mask(ids) for m, ids in zip(matchers, token_ids, strict=True)]
        times_s.append(time.perf_counter() - started_s)
        for index, mask in enumerate(masks):
            # One that has ended begins anew.
            token_id = 0 if isinstance(mask, FinishReason) else _pick(mask, generator)
            if token_id == 0:
                matchers[index], token_ids[index] = grammar.matcher(request), [7]
            else:
                token_ids[index].append(token_id)
    median_ms, worst_ms = statistics.median(times_s) * 1e3, max(times_s) * 1e3
    print(
        f"{structure.kind:12} {num_sequences} sequences: median {median_ms:.2f} ms a step, "
        f"worst {worst_ms:.2f} ms"
    )


def _pick(mask: bytes, generator: random.Random) -> int:
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return int(generator.choice(np.flatnonzero(bits)))


if __name__ == "__main__":
    main()
