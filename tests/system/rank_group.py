"""An engine whose ranks are Ray actors, and the tokens of some requests on it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pagedray import LLM, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    import psutil

__all__ = ["kill_when_running", "open_group", "tokens_of"]

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


def kill_when_running(llm: LLM, num_tokens: int, victim: psutil.Process) -> int:
    """Kill a rank after some tokens; return their number."""
    while llm.stats().num_generated_tokens < num_tokens:
        time.sleep(0.005)
    victim.kill()
    return llm.stats().num_generated_tokens
