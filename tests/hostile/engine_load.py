"""What the work of an attack costs the honest tenant where there are no frontends: in process."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from pagedray import AsyncLLM, RequestOutputKind, SamplingParams
from tests.hostile.engine_work import EngineWork
from tests.hostile.honest_tenant import NUM_TOKENS, PROMPT
from tests.load.measured_server import SERVER_CORE
from tests.orphan_guard import end_with_parent
from tests.system.server_process import TINY_LLAMA

if TYPE_CHECKING:
    from cluster.llm.prompts import SaltedPrompt
    from pagedray.request import Request
    from pagedray.sampling_params import SamplingParams as RequestParams
    from tests.hostile.attack import Attack, Findings

__all__ = ["EngineGaps", "EngineLoad"]

_NUM_ROWS = 15
"""What streams of an attack have of the server's 16 rows beside the honest tenant's."""
_WARM_UP_S = 1.0
_tenant = ContextVar("tenant", default="honest")


@dataclass(frozen=True, slots=True)
class EngineGaps:
    """Times between the tokens of a stream in process, in seconds."""

    before_s: tuple[float, ...]
    """Alone."""
    beside_s: tuple[float, ...]
    """Beside the load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The load that an attack puts on the engine."""

    work: EngineWork
    rate_per_s: float
    """How many begin in a second, unless they fill all rows."""

    @classmethod
    def of(cls, attack: Attack, findings: Findings, seconds: float) -> EngineLoad | None:
        """Return the load of an attack as the server let it through; None if it names none."""
        work = attack.engine_work
        if work is None:
            return None
        answers = findings.figures["answers"]
        assert isinstance(answers, dict)
        return cls(work=work, rate_per_s=answers.get("200", 0) * work.num_prompts / seconds)

    def measure(self, before_s: float, seconds: float) -> EngineGaps:
        """Return the times in a process on the server's core, with the server's engine options."""
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context, initializer=_pin) as process:
            return process.submit(_run, self, before_s, seconds).result()


def _pin() -> None:
    os.sched_setaffinity(0, {SERVER_CORE})
    end_with_parent()


def _run(load: EngineLoad, before_s: float, seconds: float) -> EngineGaps:
    return asyncio.run(_measure(load, before_s, seconds))


class _TenantsLLM(AsyncLLM):
    """Bills each request to the tenant of its task, as a server does to that of its key.

    Among requests of one tenant, those of the load would preempt the honest ones.
    """

    async def _validated(self, prompt: SaltedPrompt, params: RequestParams) -> Request:
        request = await super()._validated(prompt, params)
        return msgspec.structs.replace(request, tenant=_tenant.get())


async def _measure(load: EngineLoad, before_s: float, seconds: float) -> EngineGaps:
    async with _TenantsLLM(
        TINY_LLAMA,
        show_progress=False,
        executor="local",
        device="cpu",
        num_threads=1,
        dtype="float32",
        num_blocks=128,
        max_num_seqs=_NUM_ROWS + 1,
        max_num_batched_tokens=load.work.max_num_batched_tokens,
    ) as llm:
        await _gaps(llm, _WARM_UP_S)
        before = await _gaps(llm, before_s)
        loading = asyncio.create_task(_load(llm, load, time.monotonic() + seconds))
        beside = await _gaps(llm, seconds)
        await loading
    return EngineGaps(tuple(before), tuple(beside))


async def _gaps(llm: AsyncLLM, seconds: float) -> list[float]:
    """Stream as the honest tenant does, and return the times between tokens."""
    gaps_s: list[float] = []
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        last_s = 0.0
        sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0)
        async for _ in llm.generate(PROMPT, sampling):
            now_s = time.perf_counter()
            if last_s:
                gaps_s.append(now_s - last_s)
            last_s = now_s
    return gaps_s


async def _load(llm: AsyncLLM, load: EngineLoad, end_s: float) -> None:
    work = load.work
    prompt = work.prompt if isinstance(work.prompt, str) else list(work.prompt)
    sampling = SamplingParams(
        max_tokens=work.max_tokens,
        ignore_eos=True,
        logprobs=work.num_logprobs,
        prompt_logprobs=work.num_prompt_logprobs,
        output_kind=RequestOutputKind.DELTA,
    )

    # Of this task, and of those that it starts.
    _tenant.set("hostile")

    async def run() -> None:
        async for _ in llm.generate(prompt, sampling):
            pass

    async def run_on() -> None:
        while time.monotonic() < end_s:
            await run()

    async with asyncio.TaskGroup() as running:
        if work.fills_rows:
            for _ in range(_NUM_ROWS):
                running.create_task(run_on())
        elif load.rate_per_s:
            while time.monotonic() < end_s:
                running.create_task(run())
                await asyncio.sleep(1 / load.rate_per_s)
