"""Every published configuration that is supported, at its full size with dummy weights.

    python -m bench.full_size --output bench/results/full_size.json

A model starts in a process of its own and generates greedily from two prompts, twice, or embeds or
scores two texts. `start_s` is the time until its engine accepts requests, with kernels compiled if
they were not; `gigabytes` is the most memory of the device that its tensors took, of which the
cache and the graphs of four sequences are a small part. A model that fails has its error instead.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bench.engine import write_results
from pagedray import LLM, SamplingParams
from pagedray.errors import CheckpointError
from scripts.published_models import PublishedFile, published_files, written_config
from tests.small_models.checkpoints import save_word_tokenizer
from workers.models.families.registry import read_model_config

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig

NUM_TOKENS = 8
MAX_MODEL_LEN = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The figures of a model, or its error."""

    model: str
    task: str
    start_s: float | None = None
    gigabytes: float | None = None
    error: str | None = None


def main() -> int:
    """Start every model, print a line for each and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", action="append", help="repeatable (all), as the files are named")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--lanes", type=int, default=1, help="models that run at a time (1)")
    parser.add_argument("--limit-s", type=float, default=300.0, help="for one model (300)")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(_start(_supported()[options.one], options.device, options.backend)))
        return 0
    names = options.model or list(_supported())
    with ThreadPoolExecutor(options.lanes) as lanes:
        rows = list(lanes.map(lambda name: _row(name, options), names))
    if options.output is not None:
        write_results(options.output, "published", rows=rows)
    return 1 if any(row.error for row in rows) else 0


def _supported() -> dict[str, tuple[PublishedFile, ModelConfig]]:
    """Return the files that are not rejected, and what they say, by their names."""
    supported = {}
    for file in published_files():
        with tempfile.TemporaryDirectory() as folder:
            try:
                config = read_model_config(written_config(file, Path(folder)))
            except CheckpointError:
                continue
        supported[file.name] = file, config
    return supported


def _row(name: str, options: argparse.Namespace) -> Row:
    """Start a model in a process of its own, and return its figures or its error."""
    file, config = _supported()[name]
    command = [sys.executable, "-m", "bench.full_size", "--one", name]
    command += ["--device", options.device, "--backend", options.backend]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=options.limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        row = Row(model=file.model, task=config.task, error=f"took over {options.limit_s:.0f} s")
    else:
        if process.returncode:
            last = (process.stderr.strip() or "no message").splitlines()[-1]
            row = Row(model=file.model, task=config.task, error=last)
        else:
            figures = json.loads(process.stdout.splitlines()[-1])
            row = Row(model=file.model, task=config.task, **figures)
    print(row.model, row.task, row.error or f"{row.start_s} s, {row.gigabytes} GB", flush=True)
    return row


def _start(
    supported: tuple[PublishedFile, ModelConfig], device: str, backend: str
) -> dict[str, float]:
    """Use a model at its full size, and return its figures."""
    file, config = supported
    with tempfile.TemporaryDirectory() as name:
        folder = written_config(file, Path(name))
        save_word_tokenizer(folder, config.vocab_size)
        started_s = time.perf_counter()
        generates = config.task == "generate"
        with LLM(
            folder,
            executor="local",
            device=device,  # type: ignore[arg-type]  # one of its values
            load_format="dummy",
            attention_backend=backend,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=4,
            num_blocks=256 if generates else None,
            num_cpu_blocks=0 if generates else None,
            # A cached prefix may round otherwise.
            enable_prefix_cache=False,
            show_progress=False,
        ) as llm:
            start_s = time.perf_counter() - started_s
            first, second = _used(llm, config), _used(llm, config)
            assert first == second
    memory = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {"start_s": round(start_s, 1), "gigabytes": round(memory / 1e9, 2)}


def _used(llm: LLM, config: ModelConfig) -> list[list[float]]:
    """Return tokens, or the numbers of the two texts."""
    if config.task == "score":
        return [llm.score("w7 w8", ["w9 w10", "w11"])]
    if config.task == "embed":
        return llm.embed([[7, 8, 9], [10, 11]])
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = [list(range(2, 302)), [7, 8, 9]]
    generations = llm.generate(prompts, sampling, use_tqdm=False)
    tokens = [[float(token) for token in one.outputs[0].token_ids] for one in generations]
    assert [len(one) for one in tokens] == [NUM_TOKENS] * 2
    return tokens


if __name__ == "__main__":
    sys.exit(main())
