"""Two tenants on one server, over both frontends: keys, reload and drain."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import openai
import pytest

from cluster.serving.auth import digest_of, new_key
from pagedray.v1 import pagedray_pb2, pagedray_pb2_grpc
from tests.system.server_process import ServerProcess

KEYS = {name: new_key() for name in ("ann", "ben", "root", "late")}
PROMPT = "def read_config(path):\n    with open(path) as file:\n        return file.read()\n" * 4
TIMEOUT_S = 90.0


def write_keys(path: Path, *names: str) -> None:
    entries = (
        f'[tenants.{name}]\nkeys = ["sha256:{digest_of(KEYS[name]).hex()}"]\n'
        f"is_admin = {'true' if name == 'root' else 'false'}\n"
        for name in names
    )
    renewed = path.with_suffix(".new")
    renewed.touch(0o600)
    renewed.write_text("\n".join(entries))
    renewed.replace(path)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    write_keys(path, "ann", "ben", "root")
    return path


@pytest.fixture(scope="module")
def server(key_file: Path) -> Iterator[ServerProcess]:
    arguments = ("--executor=local", f"--api-keys={key_file}", "--num-blocks=512", "--drain-s=90")
    with ServerProcess(arguments) as process:
        yield process


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


def client(server: ServerProcess, name: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[name], max_retries=0)


def num_cached_tokens(server: ServerProcess, name: str) -> int:
    with client(server, name) as api:
        answer = api.completions.create(model="tiny-llama", prompt=PROMPT, max_tokens=1)
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens or 0


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def endless_request(request_id: str) -> pagedray_pb2.GenerateRequest:
    """Return a request of 115 200 tokens, which run long enough to be observed."""
    return pagedray_pb2.GenerateRequest(
        text="x",
        request_id=request_id,
        sampling=pagedray_pb2.SamplingParams(n=128, max_tokens=900, ignore_eos=True),
    )


def unread_request() -> pagedray_pb2.GenerateRequest:
    """Return a request whose response exceeds the buffers of a client that does not read.

    The call stays open until the client reads, however fast it is generated.
    """
    return pagedray_pb2.GenerateRequest(
        text="x",
        sampling=pagedray_pb2.SamplingParams(max_tokens=200, logprobs=20, ignore_eos=True),
    )


def stub(server: ServerProcess) -> pagedray_pb2_grpc.GenerationServiceStub:
    # Buffers for unread responses stay small.
    options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2**14))
    return pagedray_pb2_grpc.GenerationServiceStub(
        grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", options)
    )


def metadata(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {KEYS[name]}"),)


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer pr-nobodys"}])
def test_without_a_key_nothing_but_health_is_answered(
    server: ServerProcess, header: dict[str, str]
) -> None:
    with httpx.Client(base_url=server.url, headers=header) as http:
        assert http.get("/health").status_code == 200
        assert http.get("/ready").status_code == 200
        for path in ("/v1/models", "/loads", "/metrics", "/nothing"):
            assert http.get(path).status_code == 401, path
        for path in ("/v1/completions", "/v1/embeddings", "/tokenize"):
            answer = http.post(path, content=b"{")
            assert answer.status_code == 401, path
            assert answer.json()["error"]["message"]
    with pytest.raises(grpc.RpcError) as caught:
        stub(server).Tokenize(pagedray_pb2.TokenizeRequest(text="x"), timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_metrics_are_for_admins(server: ServerProcess) -> None:
    with httpx.Client(base_url=server.url) as http:
        assert http.get("/metrics", headers=bearer("ann")).status_code == 403
        page = http.get("/metrics", headers=bearer("root"))
    assert page.status_code == 200
    assert "pagedray_requests_total" in page.text
    assert not any(key in page.text for key in KEYS.values())


def test_no_tenant_learns_from_the_cache_what_another_sent(server: ServerProcess) -> None:
    assert num_cached_tokens(server, "ann") == 0
    assert num_cached_tokens(server, "ann") > 50
    assert num_cached_tokens(server, "ben") == 0
    assert num_cached_tokens(server, "root") == 0
    assert num_cached_tokens(server, "ben") > 50


def test_sums_over_tenants_are_for_admins(server: ServerProcess) -> None:
    num_cached_tokens(server, "ann")
    with httpx.Client(base_url=server.url) as http:
        for name in ("ben", "root"):
            over_http = http.get("/loads", headers=bearer(name)).json()
            over_grpc = stub(server).GetLoads(
                pagedray_pb2.GetLoadsRequest(), metadata=metadata(name), timeout=TIMEOUT_S
            )
            sums = {over_http["num_prompt_tokens"], over_grpc.num_prompt_tokens}
            sums |= {over_http["num_steps"], over_grpc.num_steps, over_http["num_cached_blocks"]}
            sums |= {512 - over_http["num_free_blocks"]} if name == "ben" else set()
            assert (sums == {0}) == (name == "ben")
            assert over_http["num_blocks"] == over_grpc.num_blocks == 512


def test_no_tenant_sees_or_ends_what_another_runs(server: ServerProcess) -> None:
    service = stub(server)
    stream = service.Generate(endless_request("mine"), metadata=metadata("ann"), timeout=TIMEOUT_S)
    next(stream)
    # Another tenant may use the same id.
    other = service.Generate(endless_request("mine"), metadata=metadata("ben"), timeout=TIMEOUT_S)
    next(other)
    other.cancel()
    foreign = pagedray_pb2.AbortRequest(request_ids=["mine"])
    unknown = pagedray_pb2.AbortRequest(request_ids=["never was"])
    answers = [
        service.Abort(message, metadata=metadata(name), timeout=TIMEOUT_S)
        for message, name in ((foreign, "ben"), (unknown, "ben"), (foreign, "root"))
    ]
    assert answers[0] == answers[1] == answers[2]
    with httpx.Client(base_url=server.url) as http:

        def shown(name: str) -> list[str]:
            return [call["id"] for call in http.get("/loads", headers=bearer(name)).json()["calls"]]

        wait_until(lambda: shown("ben") == [])
        assert shown("ann") == ["mine"]
        assert shown("root") == ["mine"]
    assert next(stream).sequences
    service.Abort(foreign, metadata=metadata("ann"), timeout=TIMEOUT_S)
    *_, last = stream
    assert last.sequences[0].finish_reason == pagedray_pb2.FINISH_REASON_ABORTED


def test_changed_and_signaled_keys_are_read_again(server: ServerProcess, key_file: Path) -> None:
    with httpx.Client(base_url=server.url) as http:

        def status(name: str) -> int:
            return http.get("/v1/models", headers=bearer(name)).status_code

        assert (status("ben"), status("late")) == (200, 401)
        write_keys(key_file, "ann", "late", "root")
        wait_until(lambda: status("late") == 200)
        assert status("ben") == 401
        key_file.write_text("broken")
        server.send(signal.SIGHUP)
        time.sleep(0.1)
        assert status("late") == 200
        write_keys(key_file, "ann", "ben", "root")
        server.send(signal.SIGHUP)
        wait_until(lambda: status("ben") == 200)


def test_sigterm_drains_running_calls_and_rejects_others(server: ServerProcess) -> None:
    service = stub(server)
    stream = service.Generate(unread_request(), metadata=metadata("ann"), timeout=TIMEOUT_S)
    next(stream)
    with httpx.Client(base_url=server.url) as http:
        server.send(signal.SIGTERM)
        wait_until(lambda: http.get("/ready").status_code == 503)
        body = {"model": "tiny-llama", "prompt": "x"}
        rejected = http.post("/v1/completions", json=body, headers=bearer("ann"))
        assert rejected.status_code == 503
    with pytest.raises(grpc.RpcError) as caught:
        list(service.Generate(unread_request(), metadata=metadata("ann"), timeout=TIMEOUT_S))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    *_, last = stream
    assert last.usage.num_generated_tokens == 200
    assert server.wait(TIMEOUT_S) == 0
