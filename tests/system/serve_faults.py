"""What clients of Ray Serve see while replicas are replaced or killed and calls are cancelled.

    python -m tests.system.serve_faults kill kill-proxy hang hang-load redeploy cancel-grpc \
        cancel-http lost

Each part prints its results; `--output` adds them to a file with those of other parts.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import math
import os
import platform
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import httpx
import psutil
import ray

from bench.records.machine import cpu_name
from tests.system.serve_clients import (
    CancelFrontend,
    Cancelled,
    Ended,
    Streams,
    cancel_many,
    lose_some,
    summary,
)
from tests.system.serve_cluster import ServeCluster

_PARTS = (
    "kill",
    "kill-proxy",
    "hang",
    "hang-load",
    "redeploy",
    "cancel-grpc",
    "cancel-http",
    "lost",
)
_LEASE_S = 5.0


async def kill_one(cluster: ServeCluster) -> list[set[str]]:
    """Kill a replica with all its calls; return which calls each replica had."""
    calls = [{call.id for call in one.calls} for one in await cluster.loads()]
    os.kill(next(iter(cluster.replica_pids().values())), signal.SIGKILL)
    return calls


async def until_whole(cluster: ServeCluster, num_replicas: int, timeout_s: float = 300.0) -> float:
    """Wait until this number of replicas runs; return how long it took."""
    started_s = time.monotonic()
    while len(cluster.replica_pids()) != num_replicas:
        assert time.monotonic() - started_s < timeout_s, "The replicas did not come back."
        await asyncio.sleep(0.2)
    return time.monotonic() - started_s


async def _until_replaced(cluster: ServeCluster, before: set[str]) -> float:
    """Wait until as many replicas run as before, with another one; return how long it took."""
    started_s = time.monotonic()
    while len(now := set(cluster.replica_pids())) != len(before) or now == before:
        await asyncio.sleep(0.5)
    return time.monotonic() - started_s


async def redeploy(
    cluster: ServeCluster, streams: Streams, *, num_at_once: int, **arguments: object
) -> set[str]:
    """Redeploy with this number of running streams; return the replaced replicas."""
    before = cluster.replica_pids()
    change = asyncio.create_task(asyncio.to_thread(cluster.deploy, **arguments))
    while not change.done():
        await streams.start(max(num_at_once - streams.num_running, 0))
        await asyncio.sleep(0.05)
    await change
    return set(before) - set(cluster.replica_pids())


async def _kill(cluster: ServeCluster, num_clients: int, num_tokens: int) -> dict[str, object]:
    streams = Streams(cluster, num_tokens=num_tokens, temperature=0.0)
    await streams.start(num_clients)
    before = set(cluster.replica_pids())
    calls = await kill_one(cluster)
    replacing = asyncio.create_task(_until_replaced(cluster, before))
    ended = await streams.ended()
    await streams.close()
    whole_s = await replacing
    return summary(ended, num_tokens) | {
        "calls_of_replicas": [len(one) for one in calls],
        "differ_from_undisturbed": await num_differing(cluster, ended, num_tokens),
        "new_replica_after_s": round(whole_s, 1),
    }


async def _kill_proxy(
    cluster: ServeCluster, num_clients: int, num_tokens: int
) -> dict[str, object]:
    """Kill the proxy, which has all connections of clients."""
    streams = Streams(cluster, num_tokens=num_tokens)
    await streams.start(num_clients)
    ray.kill(cluster.proxy())
    killed_s = time.monotonic()
    back_after_s = await cluster.until_proxied()
    ended = await streams.ended()
    await streams.close()
    after = Streams(cluster, num_tokens=16, name="after")
    await after.start(8)
    after_ended = await after.ended()
    await after.close()
    await cluster.until_idle()
    return summary(ended, num_tokens) | {
        "last_stream_ended_s": round(max(one.ended_s for one in ended) - killed_s, 1),
        "new_proxy_after_s": round(back_after_s, 1),
        "streams_of_the_new_proxy": summary(after_ended, 16),
        "calls_gone_after_s": round(time.monotonic() - killed_s, 1),
    }


async def _hang(
    cluster: ServeCluster, num_clients: int, num_tokens: int, hang_s: float
) -> dict[str, object]:
    """Stop a replica's process, and let it go on after `hang_s`."""
    streams = Streams(cluster, num_tokens=num_tokens, temperature=0.0)
    await streams.start(num_clients)
    calls = [{call.id for call in one.calls} for one in await cluster.loads()]
    pid = next(iter(cluster.replica_pids().values()))
    os.kill(pid, signal.SIGSTOP)
    stopped_s = time.monotonic()
    try:
        await asyncio.sleep(10.0)
        # By then the replica gets no calls.
        late = Streams(cluster, num_tokens=16, name="late")
        await asyncio.wait_for(late.start(8), 60.0)
        late_ended = await late.ended()
        late_s = time.monotonic() - stopped_s
        await late.close()
        running_s = 0.0
        while (elapsed_s := time.monotonic() - stopped_s) < hang_s:
            if pid in cluster.replica_pids().values():
                running_s = elapsed_s
            await asyncio.sleep(0.5)
    finally:
        # Serve may have replaced the replica.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    ended = await streams.ended()
    await streams.close()
    whole_s = await until_whole(cluster, 2)
    return summary(ended, num_tokens) | {
        "calls_of_replicas": [len(one) for one in calls],
        "last_stream_ended_s": round(max(one.ended_s for one in ended) - stopped_s, 1),
        "late_streams": summary(late_ended, 16),
        "late_streams_ended_s": round(late_s, 1),
        "running_by_serve_s": round(running_s, 1),
        "whole_after_s": round(whole_s, 1),
        "differ_from_undisturbed": await num_differing(cluster, ended, num_tokens),
    }


async def stop_while_loading(cluster: ServeCluster, timeout_s: float = 120.0) -> psutil.Process:
    """Stop the next replica that loads, and return its process."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        for pid in cluster.replica_pids("STARTING").values():
            with contextlib.suppress(psutil.NoSuchProcess):
                loading = psutil.Process(pid)
                if any("load_watchdog" in " ".join(one.cmdline()) for one in loading.children()):
                    loading.suspend()
                    return loading
        await asyncio.sleep(0.05)
    raise TimeoutError("No replica loads.")


async def _hang_load(cluster: ServeCluster, num_clients: int, num_tokens: int) -> dict[str, object]:
    """Kill a replica, and stop the process of the one that takes its place while it loads."""
    streams = Streams(cluster, num_tokens=num_tokens, temperature=0.0)
    await streams.start(num_clients)
    await kill_one(cluster)
    loading = await stop_while_loading(cluster)
    stopped_s = time.monotonic()
    statuses: dict[str, int] = {}
    longest_s = 0.0
    try:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60.0) as client:
            while loading.is_running() and loading.status() == psutil.STATUS_STOPPED:
                asked_s = time.monotonic()
                status = str((await client.get("/ready")).status_code)
                statuses[status] = statuses.get(status, 0) + 1
                longest_s = max(longest_s, time.monotonic() - asked_s)
                await asyncio.sleep(0.5)
    except psutil.NoSuchProcess:
        pass
    killed_s = time.monotonic() - stopped_s
    ended = await streams.ended()
    await streams.close()
    await until_whole(cluster, 2)
    return summary(ended, num_tokens) | {
        "killed_after_s": round(killed_s, 1),
        "whole_after_s": round(time.monotonic() - stopped_s, 1),
        "ready_statuses": statuses,
        "longest_ready_s": round(longest_s, 2),
        "differ_from_undisturbed": await num_differing(cluster, ended, num_tokens),
    }


async def num_differing(cluster: ServeCluster, ended: Sequence[Ended], num_tokens: int) -> int:
    """Return how many greedy streams have another text than the same requests undisturbed."""
    streams = Streams(cluster, num_tokens=num_tokens, temperature=0.0)
    await streams.start(len(ended))
    texts = {one.id: one.text for one in await streams.ended()}
    await streams.close()
    return sum(one.text != texts[one.id] for one in ended if not one.error)


async def _redeploy(cluster: ServeCluster, num_clients: int, num_tokens: int) -> dict[str, object]:
    streams = Streams(cluster, num_tokens=num_tokens)
    await streams.start(num_clients)
    started_s = time.monotonic()
    gone = await redeploy(cluster, streams, num_at_once=num_clients, stall_timeout_s=100.0)
    took_s = time.monotonic() - started_s
    ended = await streams.ended()
    await streams.close()
    return summary(ended, num_tokens) | {
        "streams_at_once": num_clients,
        "replicas_replaced": len(gone),
        "took_s": round(took_s, 1),
    }


async def _cancel(
    cluster: ServeCluster, frontend: CancelFrontend, number: int
) -> dict[str, object]:
    return _figures(await cancel_many(cluster, frontend=frontend, number=number))


async def _lost(cluster: ServeCluster, number: int) -> dict[str, object]:
    """Cancel calls over Serve's gRPC proxy without our callbacks."""
    found = await lose_some(cluster, number=number)
    return {
        "cancels": found.num_cancels,
        "lost": len(found.gone_s),
        "lease_s": _LEASE_S,
        "lost_are_gone": _times(found.gone_s),
        "most_tokens_of_a_lost_call": max(found.num_tokens, default=0),
        "tokens_of_a_call_to_its_end": found.most_tokens,
    }


def _figures(found: Cancelled) -> dict[str, object]:
    return {
        "cancels": len(found.gone_s),
        "begun": found.num_begun,
        "never_gone": found.gone_s.count(math.inf),
        "gone_within_200_ms": sum(one <= 0.2 for one in found.gone_s),
        "gone": _times(found.gone_s),
        "all_free_after_a_round": _times(found.free_s),
        "a_look_took": _times(found.look_s),
    }


def _times(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(seconds)
    places = {"p50_ms": len(ordered) // 2, "p99_ms": len(ordered) * 99 // 100, "max_ms": -1}
    return {name: round(ordered[place] * 1000, 1) for name, place in places.items()}


async def _run(part: str, cluster: ServeCluster, given: argparse.Namespace) -> dict[str, object]:
    if part == "kill":
        return await _kill(cluster, given.clients, given.tokens)
    if part == "kill-proxy":
        return await _kill_proxy(cluster, given.clients, given.tokens)
    if part == "hang":
        return await _hang(cluster, given.clients, given.tokens, given.hang_s)
    if part == "hang-load":
        return await _hang_load(cluster, given.clients, given.tokens)
    if part == "redeploy":
        return await _redeploy(cluster, given.clients, given.tokens)
    if part == "lost":
        return await _lost(cluster, given.lost)
    return await _cancel(cluster, "http" if part == "cancel-http" else "grpc", given.cancels)


def _keep(path: Path, part: str, found: dict[str, object]) -> None:
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept[part] = {
        "command": " ".join(["python -m tests.system.serve_faults", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("grpcio", "ray", "torch", "uvicorn")},
        "found": found,
    }
    path.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> None:
    """Start a Ray cluster, run the parts and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=_PARTS)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--hang-s", type=float, default=40.0)
    parser.add_argument("--cancels", type=int, default=2000)
    parser.add_argument("--lost", type=int, default=160)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    # Ray then requires the token, and writes none to the home directory.
    os.environ.pop("RAY_AUTH_MODE", None)
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    for part in given.parts:
        with ServeCluster(is_guarded=part != "lost") as cluster:
            cluster.deploy(lease_s=_LEASE_S, dtype="float32")
            found = asyncio.run(_run(part, cluster, given))
        print(json.dumps({part: found}), flush=True)
        if given.output is not None:
            _keep(given.output, part, found)


if __name__ == "__main__":
    main()
