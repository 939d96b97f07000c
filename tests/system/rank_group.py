"""An engine whose ranks are Ray actors, and the tokens of some requests on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from cluster.engine.controller import Controller
from pagedray import LLM, SamplingParams
from pagedray.batch import StepOutput

_PROMPTS = [[5, 6, 7], [11] * 20, list(range(3, 60))]
_PARAMS = SamplingParams(temperature=1.0, seed=7, max_tokens=150, ignore_eos=True)


# Any: engine options of any type.
def open_group(folder: Path, *, num_ranks: int = 2, **options: Any) -> LLM:
    """Return an engine with so many ranks, to be closed by the caller."""
    return LLM(
        folder,
        tensor_parallel_size=num_ranks,
        device="cpu",
        num_threads=1,
        show_progress=False,
        **options,
    )


def tokens_of(llm: LLM) -> list[tuple[int, ...]]:
    """Return the tokens of three requests, which run together."""
    generations = llm.generate(_PROMPTS, _PARAMS, use_tqdm=False)
    return [generation.outputs[0].token_ids for generation in generations]


def kill_after_steps(llm: LLM, num_steps: int, victims: Sequence[psutil.Process]) -> None:
    """Have ranks killed once the output of so many more steps has arrived."""
    engine = llm._engine
    assert isinstance(engine, Controller)
    executor = engine._executor
    collect = executor.collect_output
    num_left = num_steps

    def collect_and_kill() -> StepOutput:
        nonlocal num_left
        output = collect()
        num_left -= 1
        if num_left == 0:
            for victim in victims:
                victim.kill()
        return output

    executor.collect_output = collect_and_kill  # type: ignore[method-assign]  # of this engine only
