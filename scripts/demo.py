"""Serves a small chat model and talks to it over gRPC and HTTP.

    .venv/bin/python scripts/demo.py MODEL

Exits with 0 only if all requests were answered, the second turn of the conversation with cached
blocks of the first one, and the server stopped cleanly.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import openai
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagedray.v1 import pagedray_pb2, pagedray_pb2_grpc

if TYPE_CHECKING:
    from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "examples" / "tiny-llama"
QUESTION = "What is the capital of France? Answer in one sentence."
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "city": {"type": "string"},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
WEATHER = {
    "name": "get_weather",
    "description": "Return the weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
SIGNALS = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM}


class DemoError(Exception):
    """The demo failed; the message says why."""


def main() -> int:
    """Run the demo and return its exit code."""
    parser = argparse.ArgumentParser(description="Serve a small chat model and talk to it.")
    parser.add_argument("model", nargs="?", type=Path, default=TINY)
    parser.add_argument(
        "--tensor-parallel-size", type=int, help="(1, or 2 for examples/tiny-llama)"
    )
    options = parser.parse_args()
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, _exit)
    try:
        # The three KV heads of SmolLM2 cannot be sharded over two ranks.
        _demo(options.model, options.tensor_parallel_size or (2 if options.model == TINY else 1))
    except (DemoError, grpc.RpcError, openai.OpenAIError, OSError) as error:
        print(f"The demo failed: {error}", file=sys.stderr)
        return 1
    return 0


def _exit(number: int, _: FrameType | None) -> NoReturn:
    """Exit as a shell reports a signal, after the server has been stopped."""
    sys.exit(128 + number)


def _demo(model: Path, num_ranks: int) -> None:
    grpc_port, http_port = _free_port(), _free_port()
    shown = model.relative_to(ROOT) if model.is_relative_to(ROOT) else model
    print(f"$ pagedray serve {shown} --tensor-parallel-size {num_ranks}")
    # A signal that arrived during the start would leave a server that nothing stops.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    server = _start(model, num_ranks, grpc_port, http_port)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        _wait_until_ready(server, grpc_port)
        answer = _ask_over_grpc(grpc_port)
        _ask_over_http(http_port, answer)
    except BaseException:
        # The first error counts.
        with contextlib.suppress(DemoError):
            _stop(server)
        raise
    _stop(server)


def _start(model: Path, num_ranks: int, grpc_port: int, http_port: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "cluster.cli",
            "serve",
            str(model),
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


def _ask_over_grpc(port: int) -> str:
    """Ask a question, print the answer while it arrives, and return it."""
    print(f"\n> {QUESTION}")
    started_s = time.monotonic()
    first_s, num_tokens, text = 0.0, 0, ""
    request = pagedray_pb2.ChatRequest(
        messages=[
            pagedray_pb2.ChatMessage(role=pagedray_pb2.CHAT_ROLE_USER, content=QUESTION),
        ],
        sampling=pagedray_pb2.SamplingParams(max_tokens=40, temperature=0.0),
    )
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        for response in stub.Chat(request, timeout=60.0):
            for sequence in response.sequences:
                first_s = first_s or time.monotonic() - started_s
                num_tokens += len(sequence.token_ids)
                text += sequence.content
                print(sequence.content, end="", flush=True)
    if not text:
        raise DemoError("No tokens were received.")
    rate = num_tokens / (time.monotonic() - started_s)
    print(f"\n  [gRPC, streamed: first token after {first_s:.2f} s, {rate:.0f} tokens/s]")
    return text


def _ask_over_http(port: int, first_answer: str) -> None:
    """Fill a JSON schema, call a tool, and continue the conversation.

    Raises DemoError if an answer is not as requested, or no prompt token was cached.
    """
    base_url = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id

        def ask(*turns: tuple[str, str], **options: Any) -> tuple[Any, str]:  # Any: of all types
            started_s = time.monotonic()
            answer = client.chat.completions.create(
                model=model,
                messages=[{"role": role, "content": text} for role, text in turns],  # type: ignore[misc]  # of two kinds
                temperature=0.0,
                max_tokens=60,
                **options,
            )
            return answer, f"{time.monotonic() - started_s:.2f} s"

        question = "Ada Lovelace, aged 36, lives in London. Write this as JSON."
        schema = {"name": "person", "schema": PERSON, "strict": True}
        answer, seconds = ask(
            ("user", question),
            response_format={"type": "json_schema", "json_schema": schema},
        )
        text = answer.choices[0].message.content
        if answer.choices[0].finish_reason == "stop":
            # On one line.
            text = json.dumps(json.loads(text))
        print(f"\n> {question}\n{text}\n  [HTTP, JSON schema: {seconds}]")

        question = "What is the weather in Paris?"
        answer, seconds = ask(
            ("user", question),
            tools=[{"type": "function", "function": WEATHER}],
            tool_choice={"type": "function", "function": {"name": WEATHER["name"]}},
        )
        calls = answer.choices[0].message.tool_calls or []
        print(f"\n> {question}")
        for call in calls:
            print(f"{call.function.name}({' '.join(call.function.arguments.split())})")
        print(f"  [HTTP, tool call: {seconds}]")
        if not calls:
            raise DemoError("The model did not call the tool.")

        question = "And what is the capital of Italy? Answer in one sentence."
        turns = (("user", QUESTION), ("assistant", first_answer), ("user", question))
        answer, seconds = ask(*turns)
        usage = answer.usage
        num_cached = usage.prompt_tokens_details.cached_tokens or 0
        print(f"\n> {question}\n{answer.choices[0].message.content}")
        print(
            f"  [HTTP, second turn: {seconds}; {num_cached} of {usage.prompt_tokens} prompt tokens "
            "were cached]"
        )
        if not num_cached:
            raise DemoError("The second turn found no block of the first one in the prefix cache.")


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
