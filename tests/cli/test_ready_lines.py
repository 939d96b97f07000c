"""What `pagedray serve` prints of its model and its KV cache once it is ready."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import pytest

from cluster.cli.server import address_lines, ready_lines
from cluster.engine.engine_options import EngineOptions, engine_config
from cluster.engine.stats import EngineStats
from cluster.scheduling.stats import SchedulerStats
from pagedray.config import KernelReport
from tests.system.server_process import ROOT, TINY_LLAMA

if TYPE_CHECKING:
    from pagedray.config import EngineConfig

PROGRAM = """
import asyncio, time
from types import SimpleNamespace
from cluster.cli.server import guard_exit

async def serve():
    guard_exit(SimpleNamespace(error={error}), asyncio.get_running_loop(), limit_s=3.0)
    {serving}

asyncio.run(serve())
"""
CASES = {
    "the loop stands still": ("'It hangs.'", "time.sleep(30.0)", 1),
    "the loop runs": ("'It hangs.'", "await asyncio.sleep(6.0)", 0),
    "the engine runs": ("None", "time.sleep(6.0)", 0),
}
"""The error of the engine, what the server does, and how it exits."""


def lines(config: EngineConfig, num_blocks: int, state_blocks: int = 0) -> list[str]:
    scheduler = SchedulerStats(
        max_num_seqs=config.max_num_seqs,
        num_running=0,
        num_waiting=0,
        num_queued_requests=0,
        num_scheduled_tokens=0,
        num_steps=0,
        num_blocks=num_blocks,
    )
    stats = EngineStats(
        scheduler=scheduler,
        num_steps=0,
        last_step_s=0.0,
        num_prompt_tokens=0,
        num_generated_tokens=0,
        block_bytes=2**18,
        kernels=KernelReport("none", {}),
        state_blocks=state_blocks,
    )
    return list(ready_lines(config, stats))


def test_requests_of_full_length_are_counted_in_whole_blocks() -> None:
    options = EngineOptions(device="cpu", dtype="float32", max_model_len=100, max_num_seqs=9)
    config = engine_config(TINY_LLAMA, options)
    model, cache = lines(config, 64)
    assert model == "LlamaForCausalLM on CPU in float32, 1 rank, context length 100"
    # 100 tokens need 7 blocks of 16.
    assert cache == "KV cache of 1024 tokens in float32: 9 requests of full length at once"
    assert "8 requests" in lines(config, 62)[1]
    assert "1 request of" in lines(config, 7)[1]
    assert len(lines(config, 0)) == 1


def test_the_memory_of_states_is_shown() -> None:
    config = engine_config(TINY_LLAMA, EngineOptions(device="cpu", max_num_seqs=512))
    # Those of 8 more are saved within chunks.
    assert lines(config, 64, 600)[2] == (
        "Recurrent states of 512 sequences of 150.0 MiB, 76.2 GiB in addition to the KV cache"
    )


def test_the_format_of_quantized_weights_is_named() -> None:
    options = EngineOptions(device="cpu", dtype="float32", quantization="fp8")
    (line,) = lines(engine_config(TINY_LLAMA, options), 0)
    assert line.startswith("LlamaForCausalLM on CPU in float32, fp8 weights, 1 rank, context")


def test_defaults_of_the_model_are_shown() -> None:
    config = engine_config(TINY_LLAMA, EngineOptions(device="cpu"))
    config = replace(config, sampling_defaults=(("temperature", 0.6), ("top_k", 20)))
    assert "temperature 0.6, top_k 20" in lines(config, 64)[-1]


@pytest.mark.parametrize(
    ("host", "allowed", "names"),
    [
        ("0.0.0.0", (), "localhost"),
        ("::", (), "localhost"),
        ("10.0.0.5", ("vllm", "box.local"), "localhost, vllm, box.local"),
        ("myserver", (), "localhost"),
        ("0.0.0.0", ("*",), None),
        ("0.0.0.0", None, None),
        ("127.0.0.1", (), None),
        ("127.0.0.9", (), None),
        ("::1", (), None),
        ("localhost", (), None),
    ],
)
def test_names_by_which_clients_reach_an_open_server_are_printed(
    host: str, allowed: tuple[str, ...] | None, names: str | None
) -> None:
    first, *others = address_lines(
        "tiny", host, http_port=1, grpc_port=2, has_tls=False, allowed_hosts=allowed
    )
    if names is None:
        assert len(others) == 1
        return
    assert first == (
        f"Without API keys, HTTP requests must name the server by an IP address, or by {names}; "
        "others get 421. Add names with --allowed-hosts, or keys with --api-key."
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_addresses_are_urls_of_the_frontends(host: str, scheme: str) -> None:
    page, ready = address_lines(
        "tiny", host, http_port=8001, grpc_port=9001, has_tls=scheme == "https"
    )
    urls = [httpx.URL(url.rstrip(".")) for url in re.findall(r"\w+://\S+", f"{page} {ready}")]
    http = (scheme, host, 8001)
    expected = [http] * 4 + [(scheme.replace("http", "grpc"), host, 9001)]
    assert [(url.scheme, url.host, url.port) for url in urls] == expected


def test_a_server_that_cannot_stop_is_ended() -> None:
    with ExitStack() as stack:
        # Together, since each waits for seconds.
        servers = {
            name: stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", PROGRAM.format(error=error, serving=serving)], cwd=ROOT
                )
            )
            for name, (error, serving, _) in CASES.items()
        }
        codes = {name: server.wait(60.0) for name, server in servers.items()}
    assert codes == {name: code for name, (_, _, code) in CASES.items()}
