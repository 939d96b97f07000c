"""The server in a separate process, with two ranks and real clients; who may call its Ray.

Faults are here that need no server of their own; others are in `faults/`.
"""

import asyncio
import errno
import ipaddress
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import psutil
import pytest
import torch
import transformers

from pagedray.v1 import pagedray_pb2, pagedray_pb2_grpc
from tests.fakes import wait_for
from tests.process_ends import still_running
from tests.system.grpc_streams import GrpcStreams
from tests.system.server_process import TINY_LLAMA, ServerProcess, run_pagedray

PROMPT = "def read_config(path):\n"
NUM_STREAMS = 64
METHODS = {
    "gcs_server": "/ray.rpc.JobInfoGcsService/GetAllJobInfo",
    "raylet": "/ray.rpc.NodeManagerService/GetNodeStats",
    "ray::GpuWorker": "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
}
"""A method of each kind of process."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[ServerProcess]:
    # In bfloat16 some CPUs round matmuls differently at other batch sizes.
    options = ("--tensor-parallel-size=2", "--num-blocks=512", "--dtype=float32")
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    with pytest.MonkeyPatch.context() as patch:
        # As an operator starts it.
        patch.delenv("RAY_AUTH_TOKEN")
        patch.setenv("HOME", str(home))
        # Both ranks would compile the kernels.
        patch.setenv("XDG_CACHE_HOME", cache)
        with ServerProcess(options, log=home / "log") as process:
            yield process


def generate_request(num_tokens: int, prompt: str = PROMPT) -> pagedray_pb2.GenerateRequest:
    return pagedray_pb2.GenerateRequest(
        text=prompt,
        sampling=pagedray_pb2.SamplingParams(
            max_tokens=num_tokens, temperature=0.0, ignore_eos=True
        ),
    )


def test_what_ranks_log_is_in_the_log_of_the_server(server: ServerProcess, home: Path) -> None:
    text = (home / "log").read_text()
    for rank in range(2):
        assert f" INFO Rank {rank}: Loaded 0.0" in text
    assert text.count(" INFO Rank 0: Attention: ") == text.count("Attention: ") > 0


def test_grpc_and_http_give_the_same_text(server: ServerProcess) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        over_grpc = "".join(
            sequence.text
            for response in stub.Generate(generate_request(24), timeout=60.0)
            for sequence in response.sequences
        )
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(
            model="tiny-llama",
            prompt=PROMPT,
            max_tokens=24,
            temperature=0.0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        over_http = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
    assert over_grpc
    assert over_http == over_grpc


def test_prompts_are_described_over_grpc_as_by_transformers(server: ServerProcess) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32)
    request = generate_request(4)
    request.sampling.prompt_logprobs = 2
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        prompt = list(stub.Tokenize(pagedray_pb2.TokenizeRequest(text=PROMPT)).token_ids)
        first, *others = stub.Generate(request, timeout=60.0)
        turn = pagedray_pb2.ChatMessage(role=pagedray_pb2.CHAT_ROLE_USER, content="x")
        chat = pagedray_pb2.ChatRequest(messages=[turn], sampling=request.sampling)
        answer = next(stub.Chat(chat, timeout=60.0))
    with torch.no_grad():
        rows = model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)[:-1]
    found = first.prompt_info.prompt_logprobs
    expected = rows[range(len(rows)), prompt[1:]]
    assert list(found.logprobs) == pytest.approx(expected.tolist(), abs=2e-4)
    assert list(found.ranks) == (1 + (rows > expected[:, None]).sum(1)).tolist()
    likeliest = rows.topk(2)
    assert list(found.top_token_ids) == likeliest.indices.flatten().tolist()
    assert list(found.top_logprobs) == pytest.approx(likeliest.values.flatten().tolist(), abs=2e-4)
    assert found.num_top_logprobs == 2
    assert not any(one.prompt_info.HasField("prompt_logprobs") for one in others)
    num_tokens = answer.prompt_info.num_prompt_tokens
    assert len(answer.prompt_info.prompt_logprobs.logprobs) == num_tokens - 1


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_the_best_choices_are_returned_in_order(server: ServerProcess, path: str) -> None:
    is_chat = path.startswith("chat")
    body = {"model": "tiny-llama", "max_tokens": 6, "temperature": 1.0, "seed": 4}
    body |= {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": PROMPT}

    def asked(**more: object) -> Any:  # JSON
        return httpx.post(f"{server.url}/v1/{path}", json=body | more, timeout=60).json()

    shown = asked(n=6, logprobs=is_chat or 0)
    best = asked(n=2, best_of=6)

    def mean(choice: Any) -> float:  # JSON
        found = choice["logprobs"]
        values = [one["logprob"] for one in found["content"]] if is_chat else None
        values = values or found["token_logprobs"]
        return float(sum(values) / len(values))

    def text(choice: Any) -> str:  # JSON
        return str(choice["message"]["content"] if is_chat else choice["text"])

    ranked = sorted(shown["choices"], key=mean, reverse=True)
    assert [text(one) for one in best["choices"]] == [text(one) for one in ranked[:2]]
    assert [one["index"] for one in best["choices"]] == [0, 1]
    assert all(one["logprobs"] is None for one in best["choices"])
    assert best["usage"]["completion_tokens"] == shown["usage"]["completion_tokens"]


def test_salted_prefixes_are_not_shared_over_grpc(server: ServerProcess) -> None:
    cached = []
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        for salt in ("one", "one", "two"):
            request = generate_request(1, PROMPT * 12)
            request.cache_salt = salt
            (*_, last) = stub.Generate(request, timeout=60.0)
            cached.append(last.usage.num_cached_tokens)
    assert cached[1] > 0 == cached[0] == cached[2]


def test_load_test_measures_it(server: ServerProcess) -> None:
    urls = {"openai": server.url, "grpc-chat": f"grpc://127.0.0.1:{server.grpc_port}"}
    for backend, url in urls.items():
        lengths = ("--random-input-len=32", "--random-output-len=8", "--ignore-eos", "--json")
        done = run_pagedray(
            *("bench", "serve", f"--backend={backend}", f"--base-url={url}"),
            *("--num-prompts=8", "--goodput", "e2el:60000", *lengths),
        )
        assert done.code == 0, done.err
        report = json.loads(done.out)
        assert (report["completed"], report["total_output_tokens"]) == (8, 64)
        assert report["request_goodput"] > 0.0


def test_cancelled_streams_leave_nothing_behind(server: ServerProcess) -> None:
    # Persistent connections and lazily created objects exist before the count.
    asyncio.run(stream_many(server, NUM_STREAMS))
    before = settled_footprint(server)

    texts = asyncio.run(stream_many(server, NUM_STREAMS))
    assert sum(text is None for text in texts) == -(-NUM_STREAMS // 3)
    finished = {text for text in texts if text is not None}
    # All uncancelled requests were equal.
    assert len(finished) == 1

    after = footprint(server)
    deadline_s = time.monotonic() + 60.0
    # A connection of the first streams may have been closed after the count.
    while not is_within(after, before) and time.monotonic() < deadline_s:
        time.sleep(0.1)
        after = footprint(server)
    assert is_within(after, before), (after, before)
    assert after["free"] == 512


def is_within(after: dict[str, float], before: dict[str, float]) -> bool:
    """Return whether a server has what it had before, and no more files."""
    return after["files"] <= before["files"] and after == {**before, "files": after["files"]}


async def stream_many(server: ServerProcess, num_streams: int) -> list[str | None]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        return await asyncio.gather(
            *(stream_one(stub, is_cancelled=index % 3 == 0) for index in range(num_streams))
        )


async def stream_one(
    stub: pagedray_pb2_grpc.GenerationServiceStub, *, is_cancelled: bool
) -> str | None:
    """Return the whole text, or None if the stream was cancelled midway."""
    call = stub.Generate(generate_request(40), timeout=120.0)
    text = ""
    num_tokens = 0
    async for response in call:
        for sequence in response.sequences:
            text += sequence.text
            num_tokens += len(sequence.token_ids)
        if is_cancelled and num_tokens >= 5:
            call.cancel()
            return None
    return text


def footprint(server: ServerProcess) -> dict[str, float]:
    """Return the resources of the server and its ranks: files, processes, running work."""
    family = [p for p in server.family() if is_ours(p)]
    metrics = server.metrics()
    return {
        "files": psutil.Process(server.pid).num_fds(),
        "processes": len(family),
        "running": metrics['pagedray_sequences{state="running"}'],
        "waiting": metrics['pagedray_sequences{state="waiting"}'],
        "free": metrics['pagedray_free_blocks{pool="device"}'],
    }


def settled_footprint(server: ServerProcess) -> dict[str, float]:
    """Return the server's resources once they are stable: connections close with a delay."""
    last = footprint(server)
    for _ in range(50):
        time.sleep(0.5)
        found = footprint(server)
        if found == last:
            break
        last = found
    return last


def is_ours(process: psutil.Process) -> bool:
    # Ray starts and ends idle workers at any time; ranks have the name of their class.
    try:
        line = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "GpuWorker" in line or "cluster.cli" in line


def test_nothing_listens_beyond_the_loopback(server: ServerProcess) -> None:
    found = listeners(server.family())
    assert {"gcs_server", "raylet", "ray::GpuWorker"} <= set(found)
    beyond = [
        f"{name} {address}"
        for name, addresses in found.items()
        for address in addresses
        if not ipaddress.ip_address(address.rpartition(":")[0]).is_loopback
    ]
    assert beyond == []


def test_other_interfaces_refuse_connections(server: ServerProcess) -> None:
    others = [
        one.address
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
        if one.family is socket.AF_INET and not ipaddress.ip_address(one.address).is_loopback
    ]
    if not others:
        pytest.skip("the machine has no other interface")
    family = server.family()
    found = [one for addresses in listeners(family).values() for one in addresses]
    ports = {int(address.rpartition(":")[2]) for address in found}
    # Another cluster of this machine, such as that of other tests, may listen on the same port.
    ports -= {
        one.laddr.port
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
        and one.laddr
        and one.pid not in {own.pid for own in family}
    }
    assert {server.http_port, server.grpc_port} < ports
    for address in others:
        for port in ports:
            with socket.socket() as connection:
                connection.settimeout(60.0)
                assert connection.connect_ex((address, port)) == errno.ECONNREFUSED


@pytest.mark.parametrize("name", METHODS)
def test_ray_answers_to_the_token_alone(server: ServerProcess, home: Path, name: str) -> None:
    token = psutil.Process(server.named("raylet")[0].pid).environ()["RAY_AUTH_TOKEN"]
    accepted, *rejected = answers(server, name, token, None, "", "0" * len(token))
    assert grpc.StatusCode.OK in accepted
    for codes in rejected:
        assert grpc.StatusCode.UNAUTHENTICATED in codes
        assert grpc.StatusCode.OK not in codes
    assert not (home / ".ray").exists()


def test_ray_is_forked_without_the_handlers_of_grpc(server: ServerProcess) -> None:
    # Beside the threads of the server, a child may hang in them before it runs a daemon.
    for name in ("gcs_server", "raylet"):
        environment = psutil.Process(server.named(name)[0].pid).environ()
        assert environment["GRPC_ENABLE_FORK_SUPPORT"] == "false"


def four_streams(server: ServerProcess) -> GrpcStreams:
    texts = ("def read(path):", "import os", "class A:", "for i in range(10):\n")
    return GrpcStreams(server, num_streams=4, num_tokens=120, texts=texts)


@pytest.mark.slow
def test_streams_go_on_after_a_rank_was_stopped(server: ServerProcess) -> None:
    with four_streams(server) as streams:
        streams.start()
        undisturbed = streams.finished_tokens()
    before = server.metrics()
    with four_streams(server) as streams:
        streams.start()
        victim = server.ranks()[-1]
        victim.suspend()
        assert streams.num_running() == 4
        # It takes 7 s; on a busy machine the watchdog counts only the time that it ran.
        wait_for(lambda: not server.is_ready(), 20.0)
        assert server.metrics()["pagedray_healthy"] == 0.0
        wait_for(server.is_ready, 60.0)
        assert streams.finished_tokens() == undisturbed
    assert not victim.is_running()
    after = server.metrics()
    replacements = "pagedray_rank_replacements_total"
    assert after[name := 'pagedray_hangs_total{kind="rank"}'] == before[name] + 1
    assert after[name := f'{replacements}{{cause="hang"}}'] == before[name] + 1
    assert after[name := f'{replacements}{{cause="death"}}'] == before[name]


def test_sigterm_lets_a_stream_finish_and_leaves_no_process_behind(server: ServerProcess) -> None:
    family = server.family()
    assert len(server.ranks()) == 2
    # More than the buffers hold of a client that does not read: the call stays open until it does.
    sampling = pagedray_pb2.SamplingParams(max_tokens=250, n=4, logprobs=20, ignore_eos=True)
    buffers = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2**14))
    with (
        httpx.Client() as client,
        grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", buffers) as channel,
    ):
        # A connected client must not keep the server alive.
        client.get(f"{server.url}/health")
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        stream = stub.Generate(pagedray_pb2.GenerateRequest(text=PROMPT, sampling=sampling))
        next(stream)
        server.send(signal.SIGTERM)
        # Ray's own handler would abort the server after 3 s.
        time.sleep(4.0)
        *_, last = stream
    assert last.usage.num_generated_tokens == 4 * 250
    assert server.wait(timeout_s=60.0) == 0
    assert still_running(family, 60.0) == []


_ANSWERS = (grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED)
_LAST_ANSWERS_S = 3.0
"""How long other ports may take to answer after one of a process has."""


def listeners(processes: list[psutil.Process]) -> dict[str, list[str]]:
    """Return the addresses on which processes listen, by name."""
    found: dict[str, list[str]] = {}
    for process in processes:
        # Ray starts and ends idle workers at any time.
        with suppress(psutil.NoSuchProcess):
            addresses = [
                # Sockets for both families have mapped addresses.
                f"{one.laddr.ip.removeprefix('::ffff:')}:{one.laddr.port}"
                for one in process.net_connections("inet")
                if one.status == psutil.CONN_LISTEN
            ]
            if addresses:
                found.setdefault(process.name(), []).extend(addresses)
    return found


def answers(server: ServerProcess, name: str, *tokens: str | None) -> list[set[grpc.StatusCode]]:
    """Call processes of Ray on each of their ports; return the codes of their answers by token."""
    with ExitStack() as stack:
        # Any: the type of a call depends on the serializers.
        calls: list[list[Any]] = [[] for _ in tokens]
        for address in listeners(server.named(name))[name]:
            channel = stack.enter_context(grpc.insecure_channel(address))
            # Any: an empty message is also an empty request.
            method: Any = channel.unary_unary(METHODS[name])  # type: ignore[call-arg]  # grpc-stubs asks for what has a default
            for token, made in zip(tokens, calls, strict=True):
                metadata = [] if token is None else [("authorization", f"Bearer {token}")]
                made.append(method.future(b"", metadata=metadata, timeout=60.0))
        for made in calls:
            wait_for(lambda: any(map(_is_answered, made)))  # noqa: B023
        # The rendezvous of rank 0 never answers.
        end_s = time.monotonic() + _LAST_ANSWERS_S
        while time.monotonic() < end_s and not all(call.done() for made in calls for call in made):
            time.sleep(0.01)
        for made in calls:
            for call in made:
                call.cancel()
        return [{call.code() for call in made} for made in calls]


def _is_answered(call: Any) -> bool:  # Any: see above
    return call.done() and call.code() in _ANSWERS
