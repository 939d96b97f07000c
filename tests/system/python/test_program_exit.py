"""Programs that end without closing the engine, as most programs written for vLLM do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.system.server_process import TINY_LLAMA

EXIT_CLOSE = """
import atexit, os, sys
from cluster.llm.options import ExitClose
atexit.register(print, "earlier handler")
exit_close = ExitClose(lambda: print("closed"))
"""
OFFLINE = f"""
import ray
from pagedray import LLM, SamplingParams
llm = LLM("{TINY_LLAMA}", device="cpu", tensor_parallel_size=2, show_progress=False)
ray.init = lambda *given, **named: print("Ray is started again.")
print(len(llm.generate("x", SamplingParams(max_tokens=3), use_tqdm=False)))
"""


def run(program: str) -> str:
    """Return what a program writes."""
    found = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300.0,
        check=True,
    )
    return found.stdout


def test_the_engine_is_closed_before_earlier_handlers_run() -> None:
    assert run(EXIT_CLOSE) == "closed\nearlier handler\n"


def test_an_engine_that_was_closed_is_not_closed_again() -> None:
    assert run(f"{EXIT_CLOSE}\nexit_close.cancel()\nexit_close.cancel()") == "earlier handler\n"


def test_a_fork_does_not_close_the_engine_of_its_parent() -> None:
    program = f"{EXIT_CLOSE}\nif os.fork():\n    os.wait()\n    exit_close.cancel()\n"
    assert run(program) == "earlier handler\n" * 2


@pytest.mark.slow
def test_ray_is_not_started_again_at_the_exit() -> None:
    assert run(OFFLINE) == "1\n"
