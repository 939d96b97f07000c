"""Tokens per second on the CPU compared with Hugging Face transformers, in one run.

    python -m bench.cpu --output bench/results/cpu.json

Both engines load the same random checkpoint, a Llama of hidden size 512 with 8 layers, 8 heads and
4 KV heads unless `--shape` names another, each in a process of its own, and take turns: A B A B. A
waiting process sleeps.

`decode` counts the tokens after the first: n - 1 tokens over the time of a call for n tokens minus
that of a call for one, which is the prefill. `call` is n tokens over the whole call. `mixed` is
requests of mixed prompt and output lengths, submitted at once, compared with the continuous
batching of transformers over the whole call. The ratio is the median over rounds of the ratio
within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel

from bench.cpu.engines import EngineProcess, PagedRay, Transformers
from bench.engine import SHAPES
from bench.records.command import command_and_date
from bench.records.machine import cpu_name

PROMPT_TOKENS = 128
NEW_TOKENS = 64
MIXED_REQUESTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table."""

    workload: str
    dtype: str
    pagedray: float
    """Tokens per second, median over rounds."""
    transformers: float
    ratio: float
    target: float | None


def main() -> int:
    """Measure, print the table and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.cpu", description="CPU throughput compared with transformers."
    )
    parser.add_argument("--dtype", action="append", choices=("float32", "bfloat16"))
    parser.add_argument("--shape", choices=SHAPES, help="in place of the small Llama")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--batch", type=int, action="append", help="batch sizes (1 8 32)")
    parser.add_argument("--no-mixed", action="store_true", help="skip continuous batching")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        _save_checkpoint(Path(folder), options.shape)
        for dtype in options.dtype or ["float32", "bfloat16"]:
            rows += _measure(Path(folder), dtype, options)
    _print_table(rows)
    if options.output:
        _write(options.output, rows)
    return 0


def _save_checkpoint(folder: Path, shape: str | None) -> None:
    torch.manual_seed(0)
    config: Any = transformers.LlamaConfig(  # Any: the class of configurations of any model
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=1536,
        vocab_size=32000,
        max_position_embeddings=2048,
        eos_token_id=None,
        bos_token_id=None,
    )
    dtype = torch.float32
    if shape is not None:
        fields = {**SHAPES[shape], "eos_token_id": None, "bos_token_id": None}
        config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
        dtype = torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    words = {f"w{index}": index for index in range(config.vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def _measure(folder: Path, dtype: str, options: argparse.Namespace) -> list[Row]:
    engines = [
        EngineProcess(kind, folder, dtype, options.threads) for kind in (PagedRay, Transformers)
    ]
    rows = []
    try:
        for batch in options.batch or [1, 8, 32]:
            rows += _measure_batch(engines, batch, dtype, options.rounds)
        if not options.no_mixed:
            rows.append(_measure_mixed(engines, dtype, options.rounds))
    finally:
        for engine in engines:
            engine.close()
    return rows


def _measure_batch(engines: list[EngineProcess], batch: int, dtype: str, rounds: int) -> list[Row]:
    prompts = _prompts([PROMPT_TOKENS] * batch)
    decode, call = [], []
    for index in range(rounds + 1):
        first = [engine.seconds("generate", prompts, 1) for engine in engines]
        whole = [engine.seconds("generate", prompts, NEW_TOKENS) for engine in engines]
        # The first round warms up.
        if index:
            call.append([batch * NEW_TOKENS / all_s for all_s in whole])
            decode.append(
                [
                    batch * (NEW_TOKENS - 1) / (all_s - one_s)
                    for all_s, one_s in zip(whole, first, strict=True)
                ]
            )
            _show(f"batch {batch}", dtype, decode[-1])
    target = 2.5 if batch == 1 else 2.0
    return [
        _row(f"decode, batch {batch}", dtype, decode, target),
        _row(f"call, batch {batch}", dtype, call, None),
    ]


def _measure_mixed(engines: list[EngineProcess], dtype: str, rounds: int) -> Row:
    generator = random.Random(0)
    prompts = _prompts([generator.randint(16, 256) for _ in range(MIXED_REQUESTS)])
    lengths = [generator.randint(16, 128) for _ in range(MIXED_REQUESTS)]
    rates = []
    for index in range(rounds + 1):
        rate = [sum(lengths) / engine.seconds("mixed", prompts, lengths) for engine in engines]
        if index:
            rates.append(rate)
            _show("mixed", dtype, rate)
    return _row(f"mixed, {MIXED_REQUESTS} requests", dtype, rates, 4.0)


def _row(workload: str, dtype: str, rates: list[list[float]], target: float | None) -> Row:
    return Row(
        workload=workload,
        dtype=dtype,
        pagedray=statistics.median(ours for ours, _ in rates),
        transformers=statistics.median(theirs for _, theirs in rates),
        ratio=statistics.median(ours / theirs for ours, theirs in rates),
        target=target,
    )


def _prompts(lengths: list[int]) -> list[list[int]]:
    generator = random.Random(1)
    return [[generator.randrange(3, 32000) for _ in range(length)] for length in lengths]


def _show(what: str, dtype: str, rates: list[float]) -> None:
    print(f"{what:10s} {dtype:9s} {rates[0]:7.0f} / {rates[1]:7.0f}", file=sys.stderr, flush=True)


def _print_table(rows: list[Row]) -> None:
    print("| workload | dtype | pagedray tok/s | transformers tok/s | ratio | target |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for row in rows:
        print(
            f"| {row.workload} | {row.dtype} | {row.pagedray:.0f} | {row.transformers:.0f} "
            f"| {row.ratio:.2f} | {row.target or ''} |"
        )


def _write(path: Path, rows: list[Row]) -> None:
    results = {
        **command_and_date(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
