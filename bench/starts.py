"""How long engines take to start, each in a new process: `python -m bench.starts`.

With `--empty-cache`, the first start compiles all Triton kernels, in a new folder.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

__all__ = ["StartRow", "main", "measure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRow:
    """One start."""

    num_ranks: int
    executor: str
    compiles: bool
    """Whether it begins with an empty folder of compiled kernels."""
    import_s: float
    """Seconds until `pagedray` is imported."""
    start_s: float
    """Seconds until `LLM` returns, and requests are served."""
    first_call_s: float
    """Seconds of the first request, of three tokens and two more."""


def main() -> int:
    """Measure each start, print it, and write all if requested."""
    # Imported here, since the processes that start engines import this module as well.
    from bench.engine import SHAPES, save_model
    from bench.records.run_record import write_results

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b", help="with random weights")
    parser.add_argument("--model", type=Path, help="a folder with weights, in place of a shape")
    parser.add_argument("--num-ranks", type=int, default=1)
    parser.add_argument("--executor", choices=("ray", "local"), default="ray")
    parser.add_argument("--starts", type=int, default=3, help="one after the other (3)")
    parser.add_argument("--empty-cache", action="store_true", help="of kernels, for the first")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows: list[StartRow] = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as kernels:
        if options.empty_cache:
            os.environ["TRITON_CACHE_DIR"] = kernels
        if options.model is None:
            save_model(Path(folder), SHAPES[options.shape])
        for number in range(options.starts):
            # A process of its own for each.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                row = process.submit(
                    measure,
                    options.model or Path(folder),
                    load_format="dummy" if options.model is None else "auto",
                    num_ranks=options.num_ranks,
                    executor=options.executor,
                    compiles=options.empty_cache and number == 0,
                ).result()
            print(row, flush=True)
            rows.append(row)
    if options.output is not None:
        shape = options.shape if options.model is None else options.model.name
        write_results(options.output, shape, rows=rows)
    return 0


def measure(
    folder: Path,
    *,
    load_format: Literal["auto", "dummy"],
    num_ranks: int,
    executor: Literal["ray", "local"],
    compiles: bool,
) -> StartRow:
    """Start an engine, call it once, and close it; for a process that has not imported it."""
    begun_s = time.perf_counter()
    from pagedray import LLM, SamplingParams

    imported_s = time.perf_counter()
    with LLM(
        folder,
        load_format=load_format,
        tensor_parallel_size=num_ranks,
        executor=executor,
        show_progress=False,
    ) as llm:
        ready_s = time.perf_counter()
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        called_s = time.perf_counter()
    return StartRow(
        num_ranks=num_ranks,
        executor=executor,
        compiles=compiles,
        import_s=round(imported_s - begun_s, 2),
        start_s=round(ready_s - imported_s, 2),
        first_call_s=round(called_s - ready_s, 2),
    )


if __name__ == "__main__":
    raise SystemExit(main())
