"""The whole engine at the shapes of large models: scheduler, controller, ranks, sampling.

    python -m bench.engine --backend torch_sdpa --backend flashinfer --output engine.json

Weights are random, which does not change the speed; requests are token ids, submitted at once, and
outputs have a fixed length. Each combination of backend and executor runs in a process of its own
and starts with free memory. `latency` is the time of one request over its tokens; `throughput` is
the generated tokens of all requests over the time of the call; `mixed` is the same for prompts and
outputs of many lengths, so that prompts join a running batch; `prefill` is prompt tokens over the
time of a call for one token each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pagedray import LLM, SamplingParams, __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TOKENIZER = Path(__file__).resolve().parent.parent / "examples" / "tiny-llama"
MAX_TOKEN_ID = 3000
LLAMA_8B: dict[str, Any] = {  # Any: JSON values
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA_70B: dict[str, Any] = {  # Any: JSON values
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
INT4: dict[str, Any] = {  # Any: JSON values
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "sym": True,
}
QWEN3_30B_A3B: dict[str, Any] = {  # Any: JSON values
    **LLAMA_8B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "rope_theta": 1000000.0,
}
GPT_OSS_20B: dict[str, Any] = {  # Any: JSON values
    **LLAMA_8B,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "quantization_config": {"quant_method": "mxfp4"},
}
# Small enough to try the program on a CPU within seconds.
SMALL: dict[str, Any] = {  # Any: JSON values
    **LLAMA_8B,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
}
SMALL_EXPERTS: dict[str, Any] = {  # Any: JSON values
    **SMALL,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
SMALL_GPT_OSS: dict[str, Any] = {  # Any: JSON values
    **GPT_OSS_20B,
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "vocab_size": 4096,
}
SHAPES = {
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-20b-bf16": {**GPT_OSS_20B, "quantization_config": None},
    "llama-70b": LLAMA_70B,
    "llama-8b": LLAMA_8B,
    "llama-8b-int4": {**LLAMA_8B, "quantization_config": INT4},
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "small": SMALL,
    "small-int4": {**SMALL, "quantization_config": INT4},
    "small-gpt-oss": SMALL_GPT_OSS,
    "small-experts": SMALL_EXPERTS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths from a lognormal distribution, cut off at both ends."""

    log_mean: float
    log_deviation: float
    lowest: int
    highest: int

    def draw(self, chance: random.Random) -> int:
        """Return a random length."""
        length = round(chance.lognormvariate(self.log_mean, self.log_deviation))
        return min(max(length, self.lowest), self.highest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that are submitted at once."""

    name: str
    num_requests: int
    num_prompt_tokens: int | Lengths
    num_new_tokens: int | Lengths

    def lengths(self) -> list[tuple[int, int]]:
        """Return prompt tokens and new tokens of each request, the same in every call."""
        chance = random.Random(4)
        return [
            (_length(self.num_prompt_tokens, chance), _length(self.num_new_tokens, chance))
            for _ in range(self.num_requests)
        ]

    def figure(self, seconds: float) -> float:
        """Return milliseconds per token for `latency`, otherwise tokens per second."""
        num_new_tokens = sum(new for _, new in self.lengths())
        if self.name == "latency":
            return seconds / num_new_tokens * 1e3
        if self.name == "prefill":
            return sum(prompt for prompt, _ in self.lengths()) / seconds
        return num_new_tokens / seconds


def _length(length: int | Lengths, chance: random.Random) -> int:
    return length if isinstance(length, int) else length.draw(chance)


_LARGE_WORKLOADS = (
    Workload(name="latency", num_requests=1, num_prompt_tokens=128, num_new_tokens=256),
    Workload(name="throughput", num_requests=64, num_prompt_tokens=128, num_new_tokens=256),
    Workload(name="throughput", num_requests=256, num_prompt_tokens=128, num_new_tokens=512),
    Workload(
        name="mixed",
        num_requests=1000,
        num_prompt_tokens=Lengths(log_mean=5.0, log_deviation=1.1, lowest=4, highest=2048),
        num_new_tokens=Lengths(log_mean=5.2, log_deviation=0.9, lowest=4, highest=1024),
    ),
    Workload(name="prefill", num_requests=32, num_prompt_tokens=4096, num_new_tokens=1),
)
_SMALL_WORKLOADS = (
    Workload(name="latency", num_requests=1, num_prompt_tokens=32, num_new_tokens=32),
    Workload(name="throughput", num_requests=16, num_prompt_tokens=32, num_new_tokens=32),
    Workload(
        name="mixed",
        num_requests=32,
        num_prompt_tokens=Lengths(log_mean=3.0, log_deviation=1.1, lowest=4, highest=256),
        num_new_tokens=Lengths(log_mean=3.0, log_deviation=0.9, lowest=4, highest=64),
    ),
    Workload(name="prefill", num_requests=4, num_prompt_tokens=512, num_new_tokens=1),
)
WORKLOADS = {
    name: _SMALL_WORKLOADS if name.startswith("small") else _LARGE_WORKLOADS for name in SHAPES
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table."""

    backend: str
    executor: str
    num_ranks: int
    workload: Workload
    unit: str
    figure: float
    """The best round."""
    median: float
    start_s: float
    """Seconds until the engine accepts requests."""


def main() -> int:
    """Measure every combination, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", action="append", help="may be given several times (auto)")
    parser.add_argument("--executor", action="append", help="local or ray, or both (local)")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--num-ranks", type=int, default=1)
    parser.add_argument("--quantization", help="fp8 quantizes the weights (none)")
    parser.add_argument("--all-reduce", default="auto", help="auto or nccl (auto)")
    parser.add_argument(
        "--workload",
        action="append",
        choices=["latency", "throughput", "mixed", "prefill"],
        help="repeatable (all)",
    )
    parser.add_argument("--max-num-seqs", type=int, help="(as the engine chooses)")
    parser.add_argument(
        "--max-graph-tokens",
        type=int,
        default=2048,
        help="largest step with prompts that runs as CUDA graphs (2048)",
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    context = multiprocessing.get_context("spawn")
    for backend, executor in itertools.product(
        options.backend or ["auto"], options.executor or ["local"]
    ):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(options, backend, executor, sender.send))
        process.start()
        sender.close()
        try:
            rows += receiver.recv()
        except EOFError:
            print(f"{backend} on {executor} ended without results.", file=sys.stderr)
            return 1
        finally:
            process.join()
        if options.output is not None:
            write_results(options.output, options.shape, rows=rows)
    return 0


def _run(
    options: argparse.Namespace, backend: str, executor: str, send: Callable[[list[Row]], None]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), SHAPES[options.shape])
        started_s = time.perf_counter()
        with LLM(
            folder,
            executor=executor,  # type: ignore[arg-type]  # one of its values
            load_format="dummy",
            attention_backend=backend,
            tensor_parallel_size=options.num_ranks,
            all_reduce=options.all_reduce,
            quantization=options.quantization,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=8192,
            max_model_len=8192,
            enable_prefix_cache=False,
            show_progress=False,
            max_graph_tokens=options.max_graph_tokens,
        ) as llm:
            start_s = time.perf_counter() - started_s
            rows = []
            for workload in WORKLOADS[options.shape]:
                if options.workload and workload.name not in options.workload:
                    continue
                # The first call compiles kernels and allocates buffers.
                _seconds(llm, workload, max_new_tokens=16)
                times = [_seconds(llm, workload) for _ in range(options.rounds)]
                rows.append(
                    Row(
                        backend=backend,
                        executor=executor,
                        num_ranks=options.num_ranks,
                        workload=workload,
                        unit="ms/token" if workload.name == "latency" else "tokens/s",
                        figure=round(workload.figure(min(times)), 3),
                        median=round(workload.figure(statistics.median(times)), 3),
                        start_s=round(start_s, 1),
                    )
                )
                _print(rows[-1])
    send(rows)


def _seconds(llm: LLM, workload: Workload, max_new_tokens: int | None = None) -> float:
    chance = random.Random(0)
    lengths = workload.lengths()
    prompts = [[chance.randrange(2, MAX_TOKEN_ID) for _ in range(size)] for size, _ in lengths]
    sizes = [min(size, max_new_tokens or size) for _, size in lengths]
    sampling = [SamplingParams(max_tokens=size, temperature=0.0, ignore_eos=True) for size in sizes]
    started_s = time.perf_counter()
    generations = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started_s
    assert [len(one.outputs[0].token_ids) for one in generations] == sizes
    return seconds


def save_model(folder: Path, shape: dict[str, Any]) -> None:  # Any: JSON values
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    (folder / "config.json").write_text(json.dumps(shape))


def _print(row: Row) -> None:
    load = row.workload
    prompt = statistics.mean(prompt for prompt, _ in load.lengths())
    new = statistics.mean(new for _, new in load.lengths())
    print(
        f"{row.backend:12} {row.executor:6} {load.name:10} {load.num_requests:4} x "
        f"{prompt:5.0f} -> {new:4.0f}  {row.figure:12,.2f} {row.unit}",
        flush=True,
    )


def write_results(path: Path, shape: str, **results: Sequence[Any]) -> None:  # Any: dataclasses
    """Write the results by their names, with the device and the versions that gave them."""
    record = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "pagedray": __version__,
        "torch": torch.__version__,
        "shape": shape,
    } | {name: [asdict(one) for one in found] for name, found in results.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
