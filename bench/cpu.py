"""Tokens per second on the CPU beside Hugging Face transformers, in one run.

    python bench/cpu.py --dtype float32 --dtype bfloat16 --output bench/results/cpu.json

Both engines load the same random checkpoint, a Llama of hidden size 512 with 8 layers,
8 heads and 4 KV heads, and take turns: A B A B. Each figure is tokens generated over the
whole time of the call, prompt included; the ratio is the median over rounds of the ratio
within a round.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from pagedray import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

# transformers declares `generate` for a protocol that its own models do not fit.
Model = Any

PROMPT_TOKENS = 128
NEW_TOKENS = 64
MIXED_REQUESTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    workload: str
    dtype: str
    pagedray: float
    """Tokens per second, median over rounds."""
    transformers: float
    ratio: float
    target: float


def main() -> int:
    """Run what the command line asks for, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtype", action="append", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--batch", type=int, action="append", help="batch sizes (1 8 32)")
    parser.add_argument("--no-mixed", action="store_true", help="skip continuous batching")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    for dtype in options.dtype or ["float32", "bfloat16"]:
        with tempfile.TemporaryDirectory() as folder:
            _save_checkpoint(Path(folder), dtype)
            rows += _measure(Path(folder), dtype, options)
    _print_table(rows)
    if options.output:
        _write(options.output, rows)
    return 0


def _save_checkpoint(folder: Path, dtype: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
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
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    words = {f"w{index}": index for index in range(config.vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def _measure(folder: Path, dtype: str, options: argparse.Namespace) -> list[Row]:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    llm = LLM(
        folder,
        executor="local",
        device="cpu",
        num_threads=options.threads,
        enable_prefix_cache=False,
        show_progress=False,
    )
    rows = []
    try:
        for batch in options.batch or [1, 8, 32]:
            prompts = _prompts([PROMPT_TOKENS] * batch)
            lengths = [NEW_TOKENS] * batch
            rows.append(
                _row(
                    f"decode, batch {batch}",
                    dtype,
                    options.rounds,
                    sum(lengths),
                    partial(_run_ours, llm, prompts, lengths),
                    partial(_run_generate, model, prompts),
                    2.5 if batch == 1 else 2.0,
                )
            )
        if not options.no_mixed:
            rows.append(_mixed(llm, model, dtype, options.rounds))
    finally:
        llm.close()
    return rows


def _mixed(llm: LLM, model: Model, dtype: str, rounds: int) -> Row:
    generator = random.Random(0)
    prompts = _prompts([generator.randint(16, 256) for _ in range(MIXED_REQUESTS)])
    lengths = [generator.randint(16, 128) for _ in range(MIXED_REQUESTS)]
    # Its continuous batching takes one length for all: the requests are padded to the mean.
    mean = [round(statistics.mean(lengths))] * MIXED_REQUESTS
    return _row(
        f"mixed, {MIXED_REQUESTS} requests",
        dtype,
        max(2, rounds // 2),
        sum(mean),
        partial(_run_ours, llm, prompts, mean),
        partial(_run_continuous, model, prompts, mean[0]),
        4.0,
    )


def _row(
    workload: str,
    dtype: str,
    rounds: int,
    num_tokens: int,
    ours: Callable[[], None],
    theirs: Callable[[], None],
    target: float,
) -> Row:
    ours()
    theirs()
    times = []
    for _ in range(rounds):
        times.append((_seconds(ours), _seconds(theirs)))
        print(
            f"{workload:22s} {dtype:9s} "
            + " / ".join(f"{num_tokens / seconds:7.0f}" for seconds in times[-1]),
            file=sys.stderr,
            flush=True,
        )
    return Row(
        workload=workload,
        dtype=dtype,
        pagedray=num_tokens / statistics.median(mine for mine, _ in times),
        transformers=num_tokens / statistics.median(other for _, other in times),
        ratio=statistics.median(other / mine for mine, other in times),
        target=target,
    )


def _run_ours(llm: LLM, prompts: list[list[int]], lengths: list[int]) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths
    ]
    generations = llm.generate(prompts, params, show_progress=False)
    for generation, length in zip(generations, lengths, strict=True):
        assert len(generation.completions[0].token_ids) == length


def _run_generate(model: Model, prompts: list[list[int]]) -> None:
    input_ids = torch.tensor(prompts)
    with torch.inference_mode():
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
    assert output.shape[1] == input_ids.shape[1] + NEW_TOKENS


def _run_continuous(model: Model, prompts: list[list[int]], length: int) -> None:
    generation = GenerationConfig(
        max_new_tokens=length, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # Left to itself it takes half of the memory for its cache and spends seconds on clearing it.
    batching = ContinuousBatchingConfig(num_blocks=128, max_batch_tokens=2048)
    outputs = model.generate_batch(
        prompts,
        generation_config=generation,
        continuous_batching_config=batching,
        warmup=False,
    )
    for output in outputs.values():
        assert len(output.generated_tokens) == length


def _prompts(lengths: list[int]) -> list[list[int]]:
    generator = random.Random(1)
    return [[generator.randrange(3, 32000) for _ in range(length)] for length in lengths]


def _seconds(call: Callable[[], None]) -> float:
    gc.collect()
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def _print_table(rows: list[Row]) -> None:
    print("| workload | dtype | pagedray tok/s | transformers tok/s | ratio | target |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for row in rows:
        print(
            f"| {row.workload} | {row.dtype} | {row.pagedray:.0f} | {row.transformers:.0f} "
            f"| {row.ratio:.2f} | {row.target} |"
        )


def _write(path: Path, rows: list[Row]) -> None:
    results = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(results, indent=1) + "\n")


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
