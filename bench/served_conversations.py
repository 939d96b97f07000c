"""Conversations over several real replicas on Ray Serve, on a CPU.

    python -m bench.served_conversations --output bench/results/served_conversations.json

What `bench.routed_conversations` does in virtual time, with small replicas: 200 users write again
some time after each answer, and what counts is the part of the prompts that replicas compute, as
their usage says. The router places by hashing alone, within 1.25 or 1.5 times the mean load, or
also remembers where load has moved a conversation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from bench.command import command_and_date
from bench.frontend_server import MODEL
from bench.machine import cpu_name, free_port
from cluster.serving.ray_serve.deployment import PagedRay, deployment_options
from cluster.serving.ray_serve.options import read_arguments
from cluster.serving.ray_serve.routing.placement import Placement
from cluster.serving.ray_serve.routing.router import AffinityRouter

__all__ = ["ForgetfulRouter", "main"]

_ROUTER = f"{AffinityRouter.__module__}:{AffinityRouter.__name__}"
_FORGETFUL = "bench.served_conversations:ForgetfulRouter"
_WAYS = (
    ("hashing, 1.25 times the mean load", _FORGETFUL, 1.25),
    ("hashing, 1.5 times", _FORGETFUL, 1.5),
    ("hashing and memory, 1.5 times", _ROUTER, 1.5),
)
"""Names, routers, and the bound of load."""
_TITLES = ("routing", "part computed", "mean TTFT, s", "p99, s", "failed")
_MAX_WORDS = 130
"""Of a first message: a conversation fits in the context of 1 024 tokens."""
_PROXY_CALLBACK = "cluster.serving.ray_serve.http_proxy:middlewares"


class ForgetfulRouter(AffinityRouter):
    """The router without its memory of where load has moved a key."""

    def initialize_state(self, **settings: Any) -> None:  # Any: settings of all types
        """Take the deployment's settings."""
        super().initialize_state(**settings)
        self._placement = Placement(slack=settings["slack"], draws=random.Random(), most_keys=0)


@dataclass(slots=True, kw_only=True)
class Conversations:
    """What the users of one run saw."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_failed: int = 0
    ttft_s: list[float] = field(default_factory=list)
    """Of every turn but the first ones."""


def main() -> int:
    """Print what each way of routing computes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-conversations", type=int, default=200)
    parser.add_argument("--num-turns", type=int, default=10)
    parser.add_argument("--num-replicas", type=int, default=4)
    parser.add_argument("--num-blocks", type=int, default=900, help="of a replica (900)")
    parser.add_argument("--num-first-words", type=int, default=70, help="on average (70)")
    parser.add_argument("--num-answer-tokens", type=int, default=20)
    parser.add_argument("--think-s", type=float, default=15.0, help="on average (15)")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    # Serve's processes import the router of this module.
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(
        address="local",
        num_cpus=options.num_replicas + 4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    port = free_port()
    variables = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": _PROXY_CALLBACK}
    serve.start(
        http_options={"host": "127.0.0.1", "port": port},
        controller_options={"runtime_env": {"env_vars": variables}},
    )
    rows = []
    print(f"| {' | '.join(_TITLES)} |\n|{' ---: |' * len(_TITLES)}")
    try:
        for name, router, slack in _WAYS:
            _deploy(options, router, slack)
            seen = asyncio.run(_run(options, f"http://127.0.0.1:{port}"))
            rows.append(_row(name, seen))
            print(f"| {' | '.join(map(_cell, rows[-1].values()))} |", flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()
    if options.output:
        report = {
            **command_and_date(),
            "cpu": cpu_name(),
            "python": platform.python_version(),
            "ray": ray.__version__,
            "rows": rows,
        }
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _deploy(options: argparse.Namespace, router: str, slack: float) -> None:
    """Start new replicas, whose caches are empty."""
    arguments = read_arguments(
        {
            "model": str(MODEL),
            "num_replicas": options.num_replicas,
            "device": "cpu",
            "executor": "local",
            "num_threads": 1,
            "num_blocks": options.num_blocks,
            "num_cpu_blocks": 0,
        }
    )
    deployment = deployment_options(arguments) | {
        "request_router_config": RequestRouterConfig(
            request_router_class=router,  # type: ignore[arg-type]  # the stubs are narrower than the library
            request_router_kwargs={"slack": slack},
            request_routing_stats_period_s=1.0,  # type: ignore[arg-type]  # the stubs are narrower than the library
        )
    }
    serve.delete("default")
    application = serve.deployment(PagedRay, **deployment).bind(arguments)  # type: ignore[attr-defined]  # Serve's decorator
    serve.run(application, name="default", route_prefix="/")


async def _run(options: argparse.Namespace, url: str) -> Conversations:
    seen = Conversations()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session:
        users = (_converse(options, session, seen, one) for one in range(options.num_conversations))
        await asyncio.gather(*users)
    return seen


async def _converse(
    options: argparse.Namespace, session: aiohttp.ClientSession, seen: Conversations, number: int
) -> None:
    draws = random.Random(number)
    messages: list[dict[str, str]] = []
    await asyncio.sleep(draws.random() * options.think_s)
    for turn in range(options.num_turns):
        num_words = draws.randint(4, 12)
        if not turn:
            num_words += int(draws.expovariate(1 / options.num_first_words))
        messages.append({"role": "user", "content": _words(draws, min(num_words, _MAX_WORDS))})
        began_s = time.perf_counter()
        try:
            text, first_s = await _answer(options, session, seen, messages)
        except (aiohttp.ClientError, TimeoutError):
            seen.num_failed += 1
            return
        if turn:
            seen.ttft_s.append(first_s - began_s)
        messages.append({"role": "assistant", "content": text})
        await asyncio.sleep(draws.expovariate(1 / options.think_s))


async def _answer(
    options: argparse.Namespace,
    session: aiohttp.ClientSession,
    seen: Conversations,
    messages: list[dict[str, str]],
) -> tuple[str, float]:
    """Return the text, and when its first part arrived. Raises ClientError."""
    body = {
        "model": MODEL.name,
        "messages": messages,
        "max_tokens": options.num_answer_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, first_s = "", 0.0
    async with session.post("/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            data = line.removeprefix(b"data: ").strip()
            if not data.startswith(b"{"):
                continue
            event = json.loads(data)
            if (error := event.get("error")) is not None:
                raise aiohttp.ClientPayloadError(error["message"])
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                first_s = first_s or time.perf_counter()
            if usage := event.get("usage"):
                seen.num_prompt_tokens += usage["prompt_tokens"]
                seen.num_cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
    return text, first_s


def _words(draws: random.Random, number: int) -> str:
    return " ".join(
        draws.choice(("def", "class", "return", "self")) + str(draws.randrange(100))
        for _ in range(number)
    )


def _row(name: str, seen: Conversations) -> dict[str, float | str]:
    ttft_s = sorted(seen.ttft_s)
    if not ttft_s:
        raise SystemExit(f"No second turn was answered; {seen.num_failed} conversations failed.")
    return {
        "routing": name,
        "computed": 1 - seen.num_cached_tokens / seen.num_prompt_tokens,
        "mean_ttft_s": sum(ttft_s) / len(ttft_s),
        "p99_ttft_s": ttft_s[len(ttft_s) * 99 // 100],
        "failed": float(seen.num_failed),
    }


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3f}".rstrip("0").rstrip(".")


if __name__ == "__main__":
    sys.exit(main())
