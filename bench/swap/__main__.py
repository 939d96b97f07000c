"""Copies between the device and the CPU pool: how fast they are, and what they gain.

    python -m bench.swap --part rates --output rates.json
    python -m bench.swap --part pool --output pool.json
    python -m bench.swap --part prefixes --output prefixes.json

Weights are random, and one rank runs in this process. `rates` times copies of each direction and of
both, then decode steps of 64 sequences alone and while copies are under way all the time. `pool`
compares kinds of preemption, where all requests would need 1.5 times the device pool, with a pool
that they fit in. `prefixes` has conversations over a shared prefix that would fill the device pool
twice, with and without the CPU pool as a second tier of the prefix cache. A part that takes longer
than `--limit-s` ends early, and says so. Nothing is measured before the CPU pool is pinned.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.engine import SHAPES, save_model, write_results
from bench.swap.engine import measured_engine
from bench.swap.loads import ConversationLoad, PoolLoad, run_conversations, run_pool
from bench.swap.rates import measured_rates
from pagedray.node_memory import NodeMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTS = ("rates", "pool", "prefixes")
MAX_POSITIONS = 65536


def main() -> int:
    """Measure the chosen parts, print a line for each figure and write them."""
    options = _parser().parse_args()
    rows: list[Any] = []  # Any: dataclasses
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), SHAPES[options.shape] | {"max_position_embeddings": MAX_POSITIONS})
        for part in options.part or PARTS:
            for row in _rows(part, Path(folder), options):
                rows.append(row)
                print(json.dumps({type(row).__name__: asdict(row)}), flush=True)
                if options.output is not None:
                    write_results(options.output, options.shape, rows=rows)
    return 0


def _rows(part: str, folder: Path, options: argparse.Namespace) -> Iterator[Any]:  # Any: as above
    if part == "rates":
        memory = NodeMemory("cpu-pool") if options.kept_pool else None
        yield from measured_rates(
            folder,
            num_blocks=options.num_copied_blocks,
            num_steps=options.num_steps,
            memory=memory,
        )
    elif part == "pool":
        load = PoolLoad(
            num_requests=options.num_requests,
            num_prompt_tokens=options.num_prompt_tokens,
            num_new_tokens=options.num_new_tokens,
        )
        for mode in options.mode or ["fit", "auto", "recompute", "swap"]:
            num_blocks = load.num_blocks if mode == "fit" else int(load.num_blocks / 1.5)
            with measured_engine(
                folder,
                num_blocks=num_blocks,
                num_cpu_blocks=options.num_cpu_blocks or load.num_blocks,
                preemption="auto" if mode == "fit" else mode,
                # What comes back from there is not recomputed.
                enable_cpu_prefix_cache=mode != "recompute",
                max_model_len=load.num_prompt_tokens + load.num_new_tokens,
                max_num_seqs=load.num_requests,
                max_num_batched_tokens=options.max_num_batched_tokens,
            ) as engine:
                yield run_pool(engine, load, mode=mode, limit_s=options.limit_s)
    else:
        talk = ConversationLoad(
            num_conversations=options.num_conversations,
            num_turns=options.num_turns,
            num_shared_tokens=options.num_shared_tokens,
            num_message_tokens=options.num_message_tokens,
            num_answer_tokens=options.num_answer_tokens,
            think_s=options.think_s,
        )
        for has_tier in (True, False):
            with measured_engine(
                folder,
                num_blocks=talk.num_blocks // 2,
                num_cpu_blocks=options.num_cpu_blocks or talk.num_blocks,
                enable_cpu_prefix_cache=has_tier,
                max_model_len=talk.max_len,
                max_num_seqs=talk.num_conversations,
                max_num_batched_tokens=options.max_num_batched_tokens,
            ) as engine:
                yield run_conversations(engine, talk, has_tier=has_tier, limit_s=options.limit_s)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.swap", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="repeatable (all)")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--limit-s", type=float, default=90.0, help="for each row (90)")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--num-cpu-blocks", type=int, help="(as many as all requests need)")
    rates = parser.add_argument_group("rates")
    rates.add_argument("--num-copied-blocks", type=int, default=1024)
    rates.add_argument("--num-steps", type=int, default=400, help="decode steps (400)")
    rates.add_argument(
        "--kept-pool", action="store_true", help="a CPU pool in memory that outlives its rank"
    )
    pool = parser.add_argument_group("pool")
    pool.add_argument(
        "--mode",
        action="append",
        choices=["fit", "auto", "recompute", "swap"],
        help="a pool that fits, or a kind of preemption; repeatable (all)",
    )
    pool.add_argument("--num-requests", type=int, default=32)
    pool.add_argument("--num-prompt-tokens", type=int, default=16384)
    pool.add_argument("--num-new-tokens", type=int, default=1024)
    prefixes = parser.add_argument_group("prefixes")
    prefixes.add_argument("--num-conversations", type=int, default=64)
    prefixes.add_argument("--num-turns", type=int, default=8)
    prefixes.add_argument("--num-shared-tokens", type=int, default=8192)
    prefixes.add_argument("--num-message-tokens", type=int, default=600)
    prefixes.add_argument("--num-answer-tokens", type=int, default=64)
    prefixes.add_argument("--think-s", type=float, default=2.0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
