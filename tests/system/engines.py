"""Engines of tests: small ones in this process, groups of Ray actors and their processes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.engine.engine_loop import EngineLoop
from cluster.engine.engine_options import EngineOptions, engine_config
from cluster.engine.open_engine import open_engine
from cluster.serving.text.tokenizer import Tokenizer
from pagedray import LLM, AsyncLLM, SamplingParams
from pagedray.batch import StepOutput
from pagedray.config import EngineConfig
from tests.serving.conftest import Server
from tests.system.server_process import TINY_LLAMA

_PROMPTS = [[5, 6, 7], [11] * 20, list(range(3, 60))]
_PARAMS = SamplingParams(temperature=1.0, seed=7, max_tokens=150, ignore_eos=True)


# Any: engine options of any type.
def open_llm(folder: Path = TINY_LLAMA, **options: Any) -> LLM:
    """Return an engine in this process, to be closed by the caller.

    Rounding depends on the batch; in float32 too little to change a greedy token.
    """
    given = {"executor": "local", "device": "cpu", "dtype": "float32", "num_threads": 1}
    return LLM(folder, **{"show_progress": False, **given, **options})


class EngineServer(Server):
    """Frontends over an engine in this process."""

    # Any: engine options of any type.
    def __init__(self, folder: Path = TINY_LLAMA, **options: Any) -> None:
        given = {"executor": "local", "device": "cpu", "num_threads": 1, **options}
        self._config = engine_config(folder, EngineOptions(**given))
        super().__init__(Tokenizer.from_config(self._config))

    def config(self, context: int) -> EngineConfig:
        return self._config

    def attach(self) -> None:
        engine = open_engine(self._config, self.client, lambda what, fraction: None)
        engine.stop = engine.close  # type: ignore[attr-defined]  # as the fake engine is stopped
        self.engine = engine  # type: ignore[assignment]
        self.client.attach_engine(engine)


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
    assert isinstance(engine, EngineLoop)
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


def rank_processes() -> list[psutil.Process]:
    """Return the processes of ranks and of spares."""
    return [one for one, _ in _with_command_lines()]


def serving_processes() -> list[psutil.Process]:
    """Return the processes that run steps, oldest first; the others are spares."""
    found = [one for one, line in _with_command_lines() if "serve_controller" in line]
    return sorted(found, key=psutil.Process.create_time)


def _with_command_lines() -> list[tuple[psutil.Process, str]]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "GpuWorker" in line:
            found.append((process, line))
    return found


def hold_steps(
    llm: LLM | AsyncLLM, monkeypatch: pytest.MonkeyPatch, wait: Callable[[], object]
) -> None:
    """Have the engine wait before it takes the output of each step."""
    engine = llm._engine
    assert isinstance(engine, EngineLoop)
    executor = engine._executor
    collect = executor.collect_output

    def wait_and_collect() -> StepOutput:
        wait()
        return collect()

    monkeypatch.setattr(executor, "collect_output", wait_and_collect)
