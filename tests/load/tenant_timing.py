"""Timing side channels between tenants: `python -m tests.load.tenant_timing`.

Ann sends prompts. Ben measures the time to first token of the same prompts and of unused ones,
which must not differ. Ann's own repetition must differ, or the measurement is too coarse. This is
done again on a server whose device pool is so small that all earlier prompts are in the CPU pool.
The same holds for texts to tokenize, structures to compile, Abort of Ann's running request and of
an unknown one, and resuming Ann's stream, an unknown one, and Ben's own from beyond its end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import string
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.load.keep_alive import KeepAlive
from tests.load.measured_server import MeasuredServer, pin_load, write_keys
from tests.load.report import Report

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

__all__ = ["p_value"]


def p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the two-sided p-value by the normal approximation, with a correction for ties.

    Each sample needs at least 20 values.
    """
    num_first, num_second = len(first), len(second)
    total = num_first + num_second
    members = sorted([(value, 0) for value in first] + [(value, 1) for value in second])
    position_sum = ties = 0.0
    place = 0
    while place < total:
        end = place
        while end < total and members[end][0] == members[place][0]:
            end += 1
        size = end - place
        position_sum += (place + end + 1) / 2 * sum(which == 0 for _, which in members[place:end])
        ties += size**3 - size
        place = end
    u = position_sum - num_first * (num_first + 1) / 2
    mean = num_first * num_second / 2
    variance = num_first * num_second / 12 * (total + 1 - ties / (total * (total - 1)))
    if variance == 0:
        return 1.0
    return math.erfc(max(abs(u - mean) - 0.5, 0.0) / math.sqrt(2 * variance))


_NUM_PROMPT_TOKENS = 400
_NUM_WORDS = 150
_WORD_LENGTH = 8
_LEAST_P = 0.01
_SMALL_POOL = ("--num-blocks=64", "--max-model-len=1000", "--num-cpu-blocks=4096",
               "--preemption=swap")  # fmt: skip
"""Room for two prompts on the device; every prompt that was evicted is copied back."""


class TenantClocks:
    """Two tenants that time their requests on one server."""

    def __init__(self, server: MeasuredServer, keys: dict[str, str], *, seed: int = 0) -> None:
        self._server = server
        self._keys = keys
        self._generator = random.Random(seed)
        self._http = {
            name: KeepAlive(server.http_port, headers={"authorization": f"Bearer {key}"})
            for name, key in keys.items()
        }

    async def first_tokens(self, number: int, *, num_others: int = 0) -> dict[str, object]:
        """Compare `number` prompts that Ann has sent with as many unused ones.

        After each, Ann sends `num_others` that take its room on the device.
        """
        times: dict[str, list[float]] = {
            "ben_of_anns": [], "ben_of_unused": [], "ann_of_her_own": [], "ann_of_unused": [],
        }  # fmt: skip
        for _ in range(number):
            anns = self._prompt()
            await self._first_token("ann", anns)
            for _ in range(num_others):
                await self._first_token("ann", self._prompt())
            # Random order, since the first request finds the machine in a different state.
            looks = [
                ("ben_of_anns", "ben", anns),
                ("ben_of_unused", "ben", self._prompt()),
                ("ann_of_her_own", "ann", anns),
                ("ann_of_unused", "ann", self._prompt()),
            ]
            self._generator.shuffle(looks)
            for look, name, prompt in looks:
                times[look].append(await self._first_token(name, prompt))
        for connection in self._http.values():
            connection.close()
        return {
            "another_tenants_prompt": _compared(times["ben_of_anns"], times["ben_of_unused"]),
            "own_prompt": _compared(times["ann_of_her_own"], times["ann_of_unused"]),
        }

    async def texts(self, number: int) -> dict[str, object]:
        """Compare `number` texts that Ann has tokenized with as many unused ones."""
        return await self._compare_looks(number, self._tokenize, self._words)

    async def structures(self, number: int) -> dict[str, object]:
        """Compare `number` structures that Ann has used with as many unused ones."""
        return await self._compare_looks(number, self._generate_word, self._word)

    async def aborts(self, number: int) -> dict[str, object]:
        """Compare `number` aborts of Ann's request with as many of unknown ids."""
        times: dict[str, list[float]] = {"foreign": [], "unknown": []}
        async with grpc.aio.insecure_channel(self._server.grpc_target) as channel:
            # Any: the generated stub is not async to mypy.
            stub: Any = pagedray_pb2_grpc.GenerationServiceStub(channel)
            ann, ben = (
                (("authorization", f"Bearer {self._keys[name]}"),) for name in ("ann", "ben")
            )
            sampling = pb.SamplingParams(n=128, max_tokens=900, ignore_eos=True)
            request = pb.GenerateRequest(request_id="anns-1", text="x", sampling=sampling)
            running = stub.Generate(request, metadata=ann)
            reading = asyncio.create_task(_read(running))
            await asyncio.sleep(0.5)
            for index in range(number):
                # Ids of the same length, and different unknown ones.
                looks = [("foreign", "anns-1"), ("unknown", f"none-{index % 10}")]
                self._generator.shuffle(looks)
                for look, name in looks:
                    started_s = time.perf_counter()
                    await stub.Abort(pb.AbortRequest(request_ids=[name]), metadata=ben)
                    times[look].append(time.perf_counter() - started_s)
            assert not reading.done(), "Ann's request has ended."
            running.cancel()
            await asyncio.wait((reading,))
        return {"foreign_id": _compared(times["foreign"], times["unknown"])}

    async def streams(self, number: int) -> dict[str, object]:
        """Compare `number` attempts to resume Ann's stream with others that must fail."""
        times: dict[str, list[float]] = {"foreign": [], "unknown": [], "beyond": []}
        async with grpc.aio.insecure_channel(self._server.grpc_target) as channel:
            # Any: the generated stub is not async to mypy.
            stub: Any = pagedray_pb2_grpc.GenerationServiceStub(channel)
            for name in ("ann", "ben"):
                metadata = (("authorization", f"Bearer {self._keys[name]}"),)
                request = pb.GenerateRequest(request_id=f"{name}s-0", text="x", resumable=True)
                request.sampling.max_tokens = 8
                await _read(stub.Generate(request, metadata=metadata))
            for index in range(number):
                looks = [
                    ("foreign", "anns-0", 0),
                    ("unknown", f"none-{index % 10}", 0),
                    ("beyond", "bens-0", 1000),
                ]
                self._generator.shuffle(looks)
                for look, name, after in looks:
                    request = pb.GenerateRequest(request_id=name, resume_from=after)
                    started_s = time.perf_counter()
                    # The key is Ben's.
                    code = await stub.Generate(request, metadata=metadata).code()
                    times[look].append(time.perf_counter() - started_s)
                    assert code is grpc.StatusCode.NOT_FOUND
        return {
            "foreign_id": _compared(times["foreign"], times["unknown"]),
            "beyond_the_end": _compared(times["beyond"], times["unknown"]),
        }

    async def _compare_looks(
        self,
        number: int,
        look: Callable[[str, str], Coroutine[None, None, float]],
        make: Callable[[], str],
    ) -> dict[str, object]:
        times: dict[str, list[float]] = {"anns": [], "unused": []}
        for _ in range(number):
            anns = make()
            await look("ann", anns)
            looks = [("anns", anns), ("unused", make())]
            self._generator.shuffle(looks)
            for which, sent in looks:
                times[which].append(await look("ben", sent))
        for connection in self._http.values():
            connection.close()
        return _compared(times["anns"], times["unused"])

    async def _tokenize(self, name: str, text: str) -> float:
        answer = await self._http[name].post("/tokenize", json.dumps({"prompt": text}).encode())
        assert answer.status == 200, answer
        return answer.seconds

    async def _generate_word(self, name: str, word: str) -> float:
        body = {"model": "tiny-llama", "prompt": "x", "max_tokens": 1, "guided_regex": word}
        answer = await self._http[name].post("/v1/completions", json.dumps(body).encode())
        assert answer.status == 200, answer
        return answer.seconds

    async def _first_token(self, name: str, prompt: list[int]) -> float:
        body = {"model": "tiny-llama", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        answer = await self._http[name].post("/v1/completions", json.dumps(body).encode())
        assert answer.status == 200, answer
        return answer.seconds

    def _prompt(self) -> list[int]:
        """Return the tokens of an unused prompt.

        All have the same length, since kernels cache what they prepare for a length.
        """
        return [self._generator.randrange(10, 3000) for _ in range(_NUM_PROMPT_TOKENS)]

    def _words(self) -> str:
        """Return unused words of letters."""
        return " ".join(self._word() for _ in range(_NUM_WORDS))

    def _word(self) -> str:
        return "".join(self._generator.choices(string.ascii_lowercase, k=_WORD_LENGTH))


async def _read(call: Any) -> None:  # Any: the stub is not async to mypy
    async for _ in call:
        pass


def _compared(first: list[float], second: list[float]) -> dict[str, object]:
    p = p_value(first, second)
    return {
        "samples": len(first),
        "median_ms": round(statistics.median(first) * 1e3, 3),
        "other_median_ms": round(statistics.median(second) * 1e3, 3),
        "p": float(f"{p:.3g}"),
        "can_be_told_apart": p < _LEAST_P,
    }


def main() -> None:
    """Measure, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=300, help="of each kind (%(default)s)")
    parser.add_argument("--evicted", type=int, default=200, help="of each kind (%(default)s)")
    parser.add_argument("--texts", type=int, default=3000, help="of each kind (%(default)s)")
    parser.add_argument("--structures", type=int, default=100, help="of each kind (%(default)s)")
    parser.add_argument("--aborts", type=int, default=1000, help="of each kind (%(default)s)")
    parser.add_argument("--streams", type=int, default=3000, help="of each kind (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    Report.add_argument(parser)
    options = parser.parse_args()
    report = Report("tests.load.tenant_timing")
    pin_load()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.toml"
        keys = write_keys(path, "ann", "ben")
        arguments = (f"--api-keys={path}", "--log-level=warning", "--resume-grace-s=3600")
        with MeasuredServer(*arguments) as server:
            report.add("server", server.command)
            asyncio.run(TenantClocks(server, keys, seed=-1).first_tokens(20))
            clocks = TenantClocks(server, keys, seed=options.seed)
            report.add("first_token", asyncio.run(clocks.first_tokens(options.samples)))
            report.add("tokenized_text", asyncio.run(
                TenantClocks(server, keys, seed=options.seed).texts(options.texts)
            ))  # fmt: skip
            report.add("structure", asyncio.run(
                TenantClocks(server, keys, seed=options.seed).structures(options.structures)
            ))  # fmt: skip
            report.add("stream", asyncio.run(clocks.streams(options.streams)))
            report.add("abort", asyncio.run(clocks.aborts(options.aborts)))
        with MeasuredServer(*arguments, *_SMALL_POOL) as server:
            report.add("small_server", server.command)
            asyncio.run(TenantClocks(server, keys, seed=-1).first_tokens(20, num_others=4))
            clocks = TenantClocks(server, keys, seed=options.seed)
            times = asyncio.run(clocks.first_tokens(options.evicted, num_others=4))
            report.add("first_token_from_cpu_pool", times)
    report.write(options.output)


if __name__ == "__main__":
    main()
