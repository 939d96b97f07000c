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
import sys
from pathlib import Path

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from bench.frontend_server import MODEL
from bench.records.command import command_and_date
from bench.records.machine import cpu_name, free_port
from bench.served_conversations.forgetful_router import ForgetfulRouter
from bench.served_conversations.users import Conversations, run_conversations
from cluster.serving.ray_serve.deployment import PagedRay, deployment_options
from cluster.serving.ray_serve.options import read_arguments
from cluster.serving.ray_serve.router import AffinityRouter

_ROUTER = f"{AffinityRouter.__module__}:{AffinityRouter.__name__}"
_FORGETFUL = f"{ForgetfulRouter.__module__}:{ForgetfulRouter.__name__}"
_WAYS = (
    ("hashing, 1.25 times the mean load", _FORGETFUL, 1.25),
    ("hashing, 1.5 times", _FORGETFUL, 1.5),
    ("hashing and memory, 1.5 times", _ROUTER, 1.5),
)
"""Names, routers, and the bound of load."""
_TITLES = ("routing", "part computed", "mean TTFT, s", "p99, s", "failed")
_PROXY_CALLBACK = "cluster.serving.ray_serve.http_proxy:middlewares"


def main() -> int:
    """Print what each way of routing computes."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.served_conversations", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--num-conversations", type=int, default=200)
    parser.add_argument("--num-turns", type=int, default=10)
    parser.add_argument("--num-replicas", type=int, default=4)
    parser.add_argument("--num-blocks", type=int, default=900, help="of a replica (900)")
    parser.add_argument("--num-first-words", type=int, default=70, help="on average (70)")
    parser.add_argument("--num-answer-tokens", type=int, default=20)
    parser.add_argument("--think-s", type=float, default=15.0, help="on average (15)")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    # Serve's processes import ForgetfulRouter.
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
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
            seen = asyncio.run(run_conversations(options, f"http://127.0.0.1:{port}"))
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
    own = deployment_options(arguments)
    deployment = own | {
        "request_router_config": RequestRouterConfig(
            request_router_class=router,  # type: ignore[arg-type]  # the stubs are narrower than the library
            request_router_kwargs={
                **own["request_router_config"].request_router_kwargs,
                "slack": slack,
            },
            request_routing_stats_period_s=1.0,  # type: ignore[arg-type]  # the stubs are narrower than the library
        )
    }
    serve.delete("default")
    application = serve.deployment(PagedRay, **deployment).bind(arguments)  # type: ignore[attr-defined]  # Serve's decorator
    serve.run(application, name="default", route_prefix="/")


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
