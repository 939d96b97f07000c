"""Serves the shipped model, sends it a prompt over gRPC and HTTP, and stops it.

    .venv/bin/python scripts/demo.py

Exits with 0 only if both calls were answered, the second one with blocks of the first, and the
server stopped cleanly.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import grpc
import openai
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from pagedray.v1 import pagedray_pb2, pagedray_pb2_grpc

if TYPE_CHECKING:
    from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "tiny-llama"
SEED = 1
# Several blocks, which the second call finds in the cache.
PROMPT = '''def parse_date(text):
    """Return the date in a text such as 2024-05-17.

    Raise ValueError if the text is not a date.
    """
    parts = text.split("-")
    if len(parts) != 3:
        raise ValueError('''
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
SIGNALS = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM}


class DemoError(Exception):
    """The demo failed; the message says why."""


def main() -> int:
    """Run the demo and return its exit code."""
    parser = argparse.ArgumentParser(description="Serve the shipped model and send it a prompt.")
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, _exit)
    try:
        _demo(options.tensor_parallel_size, options.max_tokens)
    except (DemoError, grpc.RpcError, openai.OpenAIError, OSError) as error:
        print(f"The demo failed: {error}", file=sys.stderr)
        return 1
    return 0


def _exit(number: int, _: FrameType | None) -> NoReturn:
    """Exit as a shell reports a signal, after the server has been stopped."""
    sys.exit(128 + number)


def _demo(num_ranks: int, max_tokens: int) -> None:
    grpc_port, http_port = _free_port(), _free_port()
    print(f"$ pagedray serve {MODEL.relative_to(ROOT)} --tensor-parallel-size {num_ranks}")
    # A signal that arrived during the start would leave a server that nothing stops.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    server = _start(num_ranks, grpc_port, http_port)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        _wait_until_ready(server, grpc_port)
        _ask_over_grpc(grpc_port, max_tokens)
        num_prompt_tokens = _ask_over_http(http_port, max_tokens)
        _show_cache(http_port, num_prompt_tokens)
    except BaseException:
        # The first error counts.
        with contextlib.suppress(DemoError):
            _stop(server)
        raise
    _stop(server)


def _start(num_ranks: int, grpc_port: int, http_port: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "cluster.cli",
            "serve",
            str(MODEL),
            f"--tensor-parallel-size={num_ranks}",
            "--device=cpu",
            f"--grpc-port={grpc_port}",
            f"--http-port={http_port}",
            # A log line per call would appear within the generated text.
            "--log-level=warning",
        ],
        cwd=ROOT,
        start_new_session=True,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS),
    )


def _wait_until_ready(server: subprocess.Popen[bytes], grpc_port: int) -> None:
    started_s = time.monotonic()
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() - started_s < START_TIMEOUT_S:
            if server.poll() is not None:
                raise DemoError(f"pagedray serve exited with code {server.returncode}.")
            with contextlib.suppress(grpc.RpcError):
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    print(f"Ready after {time.monotonic() - started_s:.1f} s.")
                    return
            time.sleep(0.1)
    raise DemoError(f"The server was not ready within {START_TIMEOUT_S:g} s.")


def _ask_over_grpc(port: int, max_tokens: int) -> None:
    print("\n--- gRPC: pagedray.v1.GenerationService/Generate " + "-" * 20)
    print(PROMPT, end="", flush=True)
    clock = _TokenClock()
    request = pagedray_pb2.GenerateRequest(
        text=PROMPT,
        sampling=pagedray_pb2.SamplingParams(
            max_tokens=max_tokens, temperature=0.8, top_p=0.9, seed=SEED
        ),
    )
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        for response in stub.Generate(request, timeout=60.0):
            for sequence in response.sequences:
                clock.count(len(sequence.token_ids))
                print(sequence.text, end="", flush=True)
    clock.report()


def _ask_over_http(port: int, max_tokens: int) -> int:
    """Print a completion; return the number of tokens of its prompt."""
    print("\n--- HTTP: /v1/completions with the openai client " + "-" * 20)
    print(PROMPT, end="", flush=True)
    clock = _TokenClock()
    num_prompt_tokens = 0
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    with client.completions.create(
        model=client.models.list().data[0].id,
        prompt=PROMPT,
        max_tokens=max_tokens,
        temperature=0.8,
        top_p=0.9,
        seed=SEED,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        for chunk in stream:
            if chunk.choices and chunk.choices[0].text:
                clock.start()
                print(chunk.choices[0].text, end="", flush=True)
            if chunk.usage is not None:
                clock.count(chunk.usage.completion_tokens)
                num_prompt_tokens = chunk.usage.prompt_tokens
    client.close()
    clock.report()
    return num_prompt_tokens


class _TokenClock:
    """Time to the first token and tokens per second of one request."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._first_s: float | None = None
        self._num_tokens = 0

    def start(self) -> None:
        """Record the arrival of a token."""
        if self._first_s is None:
            self._first_s = time.monotonic()

    def count(self, num_tokens: int) -> None:
        """Count tokens that have arrived."""
        if num_tokens:
            self.start()
            self._num_tokens += num_tokens

    def report(self) -> None:
        """Print rate and latency. Raises DemoError if there were no tokens."""
        if self._first_s is None or self._num_tokens == 0:
            raise DemoError("No tokens were received.")
        total_s = time.monotonic() - self._started_s
        print(
            f"\n[{self._num_tokens} tokens, {self._num_tokens / total_s:.1f} tokens/s, "
            f"first after {(self._first_s - self._started_s) * 1e3:.0f} ms]"
        )


def _show_cache(port: int, num_prompt_tokens: int) -> None:
    """Print what the cache did. Raises DemoError if the second call found nothing in it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10.0) as answer:
        text = answer.read().decode()
    values: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("pool") != "cpu":
                values[sample.name] += int(sample.value)
    num_hits = values["pagedray_prefix_hit_tokens_total"]
    print("\n--- KV cache " + "-" * 56)
    print(f"Of the {num_prompt_tokens} prompt tokens of the second call, {num_hits} were cached.")
    print(
        f"{values['pagedray_cached_blocks']} of {values['pagedray_blocks']} blocks are kept for "
        "prompts with the same beginning."
    )
    print(f"{values['pagedray_preemptions_total']} calls had to wait for free blocks.")
    if not num_hits:
        raise DemoError("The second call found no block of the first one in the prefix cache.")


def _stop(server: subprocess.Popen[bytes]) -> None:
    started_s = time.monotonic()
    if server.poll() is None:
        server.send_signal(signal.SIGINT)
    try:
        code = server.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        os.killpg(server.pid, signal.SIGKILL)
        raise DemoError(f"The server did not stop within {STOP_TIMEOUT_S:g} s.") from error
    print(f"\nStopped after {time.monotonic() - started_s:.1f} s with exit code {code}.")
    if code != 0:
        raise DemoError(f"pagedray serve exited with code {code}.")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
