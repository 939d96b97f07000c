"""Streams that are resumed, over HTTP and gRPC: what is kept, how long, and for whom."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

from cluster.serving import resume
from cluster.serving.intake import BufferLimits, ReaderLimits
from cluster.serving.resume import ResumableStreams, StreamFormat
from pagedray.errors import OverloadedError, StreamTakenError, UnknownStreamError, WorkerError
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.fakes import wait_for
from tests.load.measured_server import write_keys
from tests.serving.conftest import wait_until
from tests.serving.resume.conftest import GRACE_S
from tests.virtual_time import in_virtual_time, pass_time

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    import openai

    from cluster.serving.resume import StreamReader
    from tests.serving.conftest import Server
    from tests.serving.fake_engine import FakeEngine
    from tests.serving.resume.conftest import Serving

Stub = pagedray_pb2_grpc.GenerationServiceStub
MANY = 100_000


def body(**fields: Any) -> dict[str, Any]:  # Any: JSON
    return {
        "model": "tiny", "prompt": "x", "max_tokens": 20, "ignore_eos": True, "stream": True,
        "stream_options": {"resumable": True}, **fields,
    }  # fmt: skip


def begin(http: httpx.Client, name: str, *, num_events: int = 1, **fields: Any) -> None:
    """Start a stream, read some events and close the connection."""
    headers = {"x-request-id": name}
    with http.stream("POST", "/v1/completions", json=body(**fields), headers=headers) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            num_events -= line.startswith("data")
            if not num_events:
                break


def numbers(text: str) -> list[int]:
    return [int(line[4:]) for line in text.splitlines() if line.startswith("id: ")]


def rest(http: httpx.Client, name: str, number: int | str, **headers: str) -> httpx.Response:
    return http.get(f"/v1/streams/{name}", headers={"last-event-id": str(number), **headers})


def messages(name: str, **fields: Any) -> pb.GenerateRequest:  # Any: fields of all types
    sampling = pb.SamplingParams(max_tokens=20, ignore_eos=True)
    return pb.GenerateRequest(
        text="x", request_id=name, resumable=True, sampling=sampling, **fields
    )


def code_of(stub: Stub, method: str, message: Any) -> grpc.StatusCode:  # Any: two messages
    with pytest.raises(grpc.RpcError) as caught:
        list(getattr(stub, method)(message))
    code = caught.value.code()
    assert isinstance(code, grpc.StatusCode)
    return code


def resumption(name: str, number: int, **fields: Any) -> pb.GenerateRequest:  # Any: as above
    return pb.GenerateRequest(request_id=name, resume_from=number, **fields)


def test_openai_client_reads_a_resumable_stream(openai_client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 20}
    wanted = openai_client.completions.create(**arguments).choices[0].text
    stream = openai_client.completions.create(
        **arguments, stream=True, extra_body={"stream_options": {"resumable": True}}
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == wanted


def test_stream_without_an_id_of_the_client_has_one(http: httpx.Client) -> None:
    with http.stream("POST", "/v1/completions", json=body()) as response:
        name = response.headers["x-request-id"]
        whole = response.read().decode()
    assert len(name) == 32
    assert numbers(whole) == list(range(1, len(numbers(whole)) + 1))
    assert http.get(f"/v1/streams/{name}").text == whole
    assert (
        http.get(f"/v1/streams/{name}?starting_after=2").text
        == whole.partition("id: 3")[1] + (whole.partition("id: 3")[2])
    )


def test_request_sent_again_goes_on_after_the_last_event(http: httpx.Client) -> None:
    begin(http, "again", num_events=3)
    headers = {"x-request-id": "again", "last-event-id": "3"}
    answer = http.post("/v1/completions", json=body(), headers=headers)
    assert numbers(answer.text)[0] == 4
    assert answer.text.endswith("data: [DONE]\n\n")
    other = http.post("/v1/completions", json=body(max_tokens=21), headers=headers)
    assert (other.status_code, "body differs" in other.text) == (400, True)
    assert http.post("/v1/chat/completions", json=_chat(), headers=headers).status_code == 404
    headers = {"last-event-id": "3"}
    assert http.post("/v1/completions", json=body(), headers=headers).status_code == 400


def _chat() -> dict[str, Any]:  # Any: JSON
    given = body(messages=[{"role": "user", "content": "x"}])
    del given["prompt"]
    return given


def test_id_of_a_stream_is_in_use_until_it_is_deleted(
    http: httpx.Client, stub: Stub, engine: FakeEngine
) -> None:
    begin(http, "twice", max_tokens=MANY)
    headers = {"x-request-id": "twice"}
    running = http.post("/v1/completions", json=body(), headers=headers)
    assert running.status_code == 409
    assert running.json()["error"]["code"] == "duplicate_request_id"
    assert engine.num_sequences == 1
    deleted = http.delete("/v1/streams/twice")
    assert deleted.json() == {"id": "twice", "object": "stream", "deleted": True}
    wait_for(lambda: not engine.num_sequences)
    assert rest(http, "twice", 0).status_code == 404
    begin(http, "twice")
    wait_for(lambda: not engine.num_sequences)
    finished = http.post("/v1/completions", json=body(stream=False, stream_options=None),
                         headers=headers)  # fmt: skip
    assert finished.status_code == 409
    assert code_of(stub, "Generate", messages("twice")) is grpc.StatusCode.ALREADY_EXISTS
    stub.Abort(pb.AbortRequest(request_ids=["twice"]))
    begin(http, "twice")


def test_delete_of_an_unknown_stream_says_nothing(http: httpx.Client) -> None:
    assert http.delete("/v1/streams/nobodys").status_code == 200


def test_only_sent_events_are_resumed_from(http: httpx.Client, engine: FakeEngine) -> None:
    engine.most_tokens = 10
    begin(http, "early", num_events=2)
    rejected = rest(http, "early", 25)
    assert (rejected.status_code, rejected.json()["error"]["code"]) == (404, "stream_not_found")
    assert rest(http, "unknown", 25).content == rejected.content
    assert rest(http, "early", "x").status_code == 400
    assert rest(http, "early", "-1").status_code == 400
    assert rest(http, "early", "9" * 30).status_code == 400
    engine.most_tokens = None
    assert numbers(rest(http, "early", 2).text)[0] == 3


def test_last_reader_takes_the_stream(http: httpx.Client, server: Server) -> None:
    # It does not end before another reader has it.
    server.engine.most_tokens = 5
    headers = {"x-request-id": "taken"}
    given = body(max_tokens=100)
    with http.stream("POST", "/v1/completions", json=given, headers=headers) as response:
        lines = response.iter_lines()
        assert next(lines) == "id: 1"
        with httpx.stream(
            "GET", f"{server.url}/v1/streams/taken", headers={"last-event-id": "0"}
        ) as other:
            server.engine.most_tokens = None
            whole = other.read().decode()
        assert numbers(whole)[0] == 1
        left = [line for line in lines if line.startswith("data")]
    assert json.loads(left[-2][6:])["error"]["code"] == "stream_taken"
    assert left[-1] == "data: [DONE]"


def test_grpc_stream_goes_on_after_its_call_was_cancelled(stub: Stub, engine: FakeEngine) -> None:
    call = stub.Generate(messages("cancelled"))
    first = next(call)
    assert first.number == 1
    call.cancel()
    answers = [first, *stub.Generate(resumption("cancelled", 1))]
    assert [answer.number for answer in answers] == list(range(1, len(answers) + 1))
    tokens = [one for answer in answers for part in answer.sequences for one in part.token_ids]
    assert len(tokens) == 20
    assert answers[-1].usage.num_generated_tokens == 20
    assert engine.log.aborted == []


def test_chat_is_resumed_by_chat_only(stub: Stub) -> None:
    turn = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="x")
    sampling = pb.SamplingParams(max_tokens=20, ignore_eos=True)
    message = pb.ChatRequest(messages=[turn], sampling=sampling, request_id="chat", resumable=True)
    whole = list(stub.Chat(message))
    assert code_of(stub, "Generate", resumption("chat", 0)) is grpc.StatusCode.NOT_FOUND
    answers = list(stub.Chat(pb.ChatRequest(request_id="chat", resume_from=1)))
    assert answers == whole[1:]


def test_protocols_do_not_resume_each_other(http: httpx.Client, stub: Stub) -> None:
    begin(http, "over-http")
    assert code_of(stub, "Generate", resumption("over-http", 0)) is grpc.StatusCode.NOT_FOUND
    list(stub.Generate(messages("over-grpc")))
    assert rest(http, "over-grpc", 0).status_code == 404


def test_resume_from_stands_alone(stub: Stub) -> None:
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    assert code_of(stub, "Generate", resumption("x", 1, text="y")) is invalid
    assert code_of(stub, "Generate", resumption("x", 1, resumable=True)) is invalid
    assert code_of(stub, "Generate", resumption("", 1)) is invalid
    assert code_of(stub, "Generate", resumption("x", 2**64 - 1)) is grpc.StatusCode.NOT_FOUND


def test_error_of_the_engine_reaches_who_resumes(serving: Serving) -> None:
    limits = ReaderLimits(resume_grace_s=GRACE_S, resumes_anonymous=True)
    with serving(limits) as server, httpx.Client(base_url=server.url) as http:
        begin(http, "http", max_tokens=MANY)
        with grpc.insecure_channel(server.grpc_target) as channel:
            stub = Stub(channel)
            message = messages("grpc")
            message.sampling.max_tokens = MANY
            call = stub.Generate(message)
            next(call)
            call.cancel()
            server.engine.fail_all(WorkerError("All ranks died."))
            wait_for(lambda: not server.frontends.servicer.num_open_calls)
            events = rest(http, "http", 1).text
            assert "All ranks died." in events
            assert events.endswith("data: [DONE]\n\n")
            assert code_of(stub, "Generate", resumption("grpc", 1)) is grpc.StatusCode.UNAVAILABLE


def test_resuming_is_counted(http: httpx.Client, stub: Stub, server: Server) -> None:
    def count(frontend: str) -> float:
        read = server.frontends.servicer.metrics.registry.get_sample_value
        found = read("pagedray_stream_resumes_total", {"frontend": frontend})
        assert found is not None
        return found

    before = {frontend: count(frontend) for frontend in ("http", "grpc")}
    begin(http, "counted")
    rest(http, "counted", 1)
    rest(http, "not", 1)
    list(stub.Generate(messages("counted-too")))
    list(stub.Generate(resumption("counted-too", 1)))
    assert {frontend: count(frontend) - was for frontend, was in before.items()} == {
        "http": 1,
        "grpc": 1,
    }


async def test_reader_of_a_closed_stream_gets_an_error() -> None:
    async def batches() -> AsyncGenerator[list[bytes]]:
        yield [b"one"]
        await asyncio.sleep(60.0)

    limits = ReaderLimits(resume_grace_s=GRACE_S, resumes_anonymous=True)
    streams = ResumableStreams(limits)
    generation = SimpleNamespace(id="call", tenant="", close=lambda *_: None)
    reader = streams.open_stream(generation, batches(), StreamFormat("grpc", "Generate"))  # type: ignore[arg-type]  # a stand-in
    await wait_until(lambda: streams.num_bytes > 4096)
    streams.close()
    with pytest.raises(StreamTakenError):
        await anext(reader)


async def test_resuming_does_not_look_at_what_was_delivered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def batches() -> AsyncGenerator[list[bytes]]:
        for number in range(1000):
            yield [b"x" * number]
        await asyncio.sleep(60.0)

    limits = ReaderLimits(resume_grace_s=GRACE_S, resumes_anonymous=True)
    streams = ResumableStreams(limits)
    generation = SimpleNamespace(id="call", tenant="", close=lambda *_: None)
    reader = streams.open_stream(generation, batches(), StreamFormat("grpc", "Generate"))  # type: ignore[arg-type]  # a stand-in
    num_read = 0
    while num_read < 1000:
        num_read += len(await anext(reader))
    stream = reader._stream
    stream.drop_delivered(10_000)
    size, sizes = resume.memory_of, []

    def counted_size(message: bytes) -> int:
        sizes.append(size(message))
        return sizes[-1]

    monkeypatch.setattr(resume, "memory_of", counted_size)
    streams.resume_stream("", "call", 900, protocol="grpc")
    assert not sizes
    delivered = stream.num_delivered_bytes
    stream.drop_delivered(2**30)
    assert (sum(sizes), stream.num_delivered_bytes) == (delivered, 0)
    streams.close()


async def test_what_another_stream_has_delivered_makes_room_for_a_new_one() -> None:
    async def batches() -> AsyncGenerator[list[bytes]]:
        for _ in range(10):
            yield [b"x" * 960]
        await asyncio.sleep(60.0)

    buffer = BufferLimits(512 * 2**10)
    limits = ReaderLimits(resume_grace_s=GRACE_S, resumes_anonymous=True, resume_buffer=buffer)
    streams = ResumableStreams(limits)
    form = StreamFormat("grpc", "Generate")
    readers = []
    for number in range(8):
        generation = SimpleNamespace(id=f"call {number}", tenant="", close=lambda *_: None)
        readers.append(streams.open_stream(generation, batches(), form))  # type: ignore[arg-type]  # a stand-in
    await wait_until(lambda: streams.num_bytes > buffer.tenant_bytes - 4096)
    with pytest.raises(OverloadedError):
        streams.check_room("")
    # Other tenants have room.
    streams.check_room("other")
    assert len(await anext(readers[3])) == 10
    streams.check_room("")
    assert streams.resume_stream("", "call 4", 0, protocol="grpc") is not None
    with pytest.raises(UnknownStreamError):
        streams.resume_stream("", "call 3", 0, protocol="grpc")
    streams.close()


def test_stream_is_aborted_after_its_grace_period(serving: Serving) -> None:
    limits = ReaderLimits(resume_grace_s=0.2, resumes_anonymous=True)
    with serving(limits) as server, httpx.Client(base_url=server.url) as http:
        begin(http, "late", max_tokens=MANY)
        wait_for(lambda: not server.engine.num_sequences)
        assert server.engine.log.aborted == [server.engine.log.submitted[0].id]
        servicer = server.frontends.servicer
        wait_for(lambda: not len(servicer.resumables))
        assert (servicer.num_open_calls, servicer.resumables.num_bytes) == (0, 0)
        assert rest(http, "late", 1).status_code == 404
        begin(http, "late")


def test_asking_again_at_the_end_does_not_keep_a_stream(serving: Serving) -> None:
    limits = ReaderLimits(resume_grace_s=0.5, resumes_anonymous=True)
    with serving(limits) as server, httpx.Client(base_url=server.url) as http:
        whole = http.post("/v1/completions", json=body(), headers={"x-request-id": "ended"}).text
        statuses = []
        deadline_s = time.monotonic() + 60
        while 404 not in statuses and time.monotonic() < deadline_s:
            statuses.append(rest(http, "ended", numbers(whole)[-1]).status_code)
            time.sleep(0.05)
        assert set(statuses[:-1]) <= {204}
        assert statuses[-1] == 404
        assert len(server.frontends.servicer.resumables) == 0


def test_reader_keeps_a_stream_alive(serving: Serving) -> None:
    limits = ReaderLimits(resume_grace_s=0.2, resumes_anonymous=True)
    with serving(limits) as server, httpx.Client(base_url=server.url) as http:
        # Longer than the grace period.
        server.engine.step_s = 0.02
        given = body(max_tokens=40)
        with (
            http.stream(
                "POST", "/v1/completions", json=given, headers={"x-request-id": "slow"}
            ) as first,
            httpx.stream(
                "GET", f"{server.url}/v1/streams/slow", headers={"last-event-id": "0"}
            ) as second,
        ):
            first.close()
            assert second.read().endswith(b"data: [DONE]\n\n")


def test_stream_of_another_tenant_does_not_exist(serving: Serving, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    keys = write_keys(file, "ann", "ben")
    headers = {name: f"Bearer {key}" for name, key in keys.items()}
    with serving(ReaderLimits(resume_grace_s=GRACE_S), key_file=file) as server:
        with httpx.Client(base_url=server.url, headers={"authorization": headers["ann"]}) as ann:
            begin(ann, "mine", num_events=2)
            with httpx.Client(
                base_url=server.url, headers={"authorization": headers["ben"]}
            ) as ben:
                other = rest(ben, "mine", 1)
                assert other.status_code == 404
                assert other.content == rest(ben, "unknown", 1).content
                assert ben.delete("/v1/streams/mine").status_code == 200
                begin(ben, "mine")
            assert numbers(rest(ann, "mine", 2).text)[0] == 3
        with grpc.insecure_channel(server.grpc_target) as channel:
            stub = Stub(channel)
            ann_key = (("authorization", headers["ann"]),)
            list(stub.Generate(messages("grpc"), metadata=ann_key))
            with pytest.raises(grpc.RpcError) as caught:
                list(
                    stub.Generate(
                        resumption("grpc", 1), metadata=(("authorization", headers["ben"]),)
                    )
                )
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert len(list(stub.Generate(resumption("grpc", 0), metadata=ann_key))) > 1


def test_anonymous_stream_is_resumed_by_its_body_only(serving: Serving) -> None:
    limits = ReaderLimits(resume_grace_s=GRACE_S)
    with serving(limits) as server, httpx.Client(base_url=server.url) as http:
        begin(http, "mine", num_events=2)
        for name in ("mine", "unknown"):
            rejected = rest(http, name, 1)
            assert rejected.status_code == 403
            assert "--resume-anonymous" in rejected.text
        again = {"x-request-id": "mine", "last-event-id": "2"}
        guessed = http.post("/v1/completions", json=body(prompt="y"), headers=again)
        assert guessed.status_code == 400
        assert numbers(http.post("/v1/completions", json=body(), headers=again).text)[0] == 3
        with grpc.insecure_channel(server.grpc_target) as channel:
            for message in (messages("x"), resumption("mine", 1)):
                code = code_of(Stub(channel), "Generate", message)
                assert code is grpc.StatusCode.PERMISSION_DENIED
        assert len(server.engine.log.submitted) == 1


def test_server_without_resumable_streams_says_so(serving: Serving) -> None:
    with serving(ReaderLimits()) as server:
        assert httpx.post(f"{server.url}/v1/completions", json=body()).status_code == 501
        assert httpx.get(f"{server.url}/v1/streams/x").status_code == 501
        with grpc.insecure_channel(server.grpc_target) as channel:
            stub = Stub(channel)
            for message in (messages("x"), resumption("x", 1)):
                assert code_of(stub, "Generate", message) is grpc.StatusCode.UNIMPLEMENTED


def test_old_events_are_dropped_and_memory_is_bounded(serving: Serving) -> None:
    limits = ReaderLimits(
        resume_grace_s=GRACE_S, resumes_anonymous=True, resume_buffer=BufferLimits(32 * 2**14)
    )
    with serving(limits) as server, httpx.Client(base_url=server.url) as http:
        resumables = server.frontends.servicer.resumables
        begin(http, "long", num_events=300, max_tokens=300)
        assert resumables.num_bytes <= 2**14 + 4096
        wait_for(lambda: not server.engine.num_sequences)
        assert rest(http, "long", 1).status_code == 404
        # No client reads the tokens that are generated from here on.
        begin(http, "unread", max_tokens=MANY)
        wait_for(lambda: not server.engine.num_sequences)
        assert resumables.num_bytes <= 2 * (2**14 + 4096)
        answer = rest(http, "unread", 1).text
        assert "a call may leave at most 16384 bytes of output unread" in answer
        assert numbers(answer)[0] == 2
        http.delete("/v1/streams/long")
        http.delete("/v1/streams/unread")
        assert resumables.num_bytes == 0


def test_tenant_without_room_starts_no_resumable_stream(serving: Serving) -> None:
    limits = ReaderLimits(
        resume_grace_s=GRACE_S, resumes_anonymous=True, resume_buffer=BufferLimits(32 * 2**13)
    )
    with serving(limits) as server, httpx.Client(base_url=server.url) as http:
        servicer = server.frontends.servicer
        resumables = servicer.resumables
        for number in range(40):
            headers = {"x-request-id": f"{number}"}
            num_awaited = resumables.num_awaited
            # The rest is generated once the server has noticed that the client is gone.
            server.engine.most_tokens = 1
            with http.stream("POST", "/v1/completions", json=body(), headers=headers) as rejected:
                if rejected.status_code != 200:
                    rejected.read()
                    break
            # A stream ends at once if there is room for it, but not for its first event.
            wait_for(lambda: resumables.num_awaited > num_awaited or not servicer.num_open_calls)  # noqa: B023
            server.engine.most_tokens = None
            wait_for(lambda: not servicer.num_open_calls)
        assert resumables.num_bytes <= 2**16
        assert (rejected.status_code, "resume or abort" in rejected.text) == (429, True)
        assert rejected.headers["retry-after"] == "5"
        http.delete("/v1/streams/0")
        begin(http, "more")


def test_drain_waits_for_clients_that_may_come_back(serving: Serving) -> None:
    limits = ReaderLimits(resume_grace_s=GRACE_S, resumes_anonymous=True)
    with serving(limits) as server, httpx.Client(base_url=server.url) as http:
        server.engine.most_tokens = 5
        begin(http, "left")
        wait_for(lambda: server.frontends.servicer.resumables.num_awaited == 1)
        server.engine.most_tokens = None
        wait_for(lambda: not server.frontends.servicer.num_open_calls)
        assert server.frontends.servicer.resumables.num_awaited == 1
        server.frontends.servicer.stop_accepting()
        assert rest(http, "left", 1).text.endswith("data: [DONE]\n\n")
        assert server.frontends.servicer.resumables.num_awaited == 0


async def test_delivered_messages_make_room_for_their_tenant_or_if_the_server_is_full() -> None:
    async def batches(num_messages: int) -> AsyncGenerator[list[bytes]]:
        for _ in range(num_messages):
            yield [b"x" * 960]
        await asyncio.sleep(60.0)

    def open_stream(tenant: str, number: int, num_messages: int) -> StreamReader:
        generation = SimpleNamespace(id=f"{number}", tenant=tenant, close=lambda *_: None)
        form = StreamFormat("grpc", "Generate")
        return streams.open_stream(generation, batches(num_messages), form)  # type: ignore[arg-type]  # a stand-in

    buffer = BufferLimits(512 * 2**10)
    limits = ReaderLimits(resume_grace_s=GRACE_S, resume_buffer=buffer)
    streams = ResumableStreams(limits)
    readers = [
        open_stream(tenant, number, 10) for tenant in ("ann", "ben", "cid", "dan")
        for number in range(8)
    ]  # fmt: skip
    for number in range(2):
        open_stream("eve", number, 0)
    await wait_until(lambda: streams.num_bytes > buffer.total_bytes - 4096)
    full_bytes = streams.num_bytes
    # One of ann.
    assert len(await anext(readers[0])) == 10
    with pytest.raises(OverloadedError):
        streams.check_room("ben")
    assert streams.num_bytes == full_bytes
    streams.check_room("eve")
    assert streams.num_bytes < full_bytes
    streams.close()


def _kept_stream(grace_s: float) -> ResumableStreams:
    """Return the streams of a server with one, `call`, whose reader has left."""

    async def batches() -> AsyncGenerator[list[bytes]]:
        yield [b"x"]
        await asyncio.sleep(1000.0)

    limits = ReaderLimits(resume_grace_s=grace_s, resumes_anonymous=True)
    streams = ResumableStreams(limits)
    generation = SimpleNamespace(id="call", tenant="", close=lambda *_: None)
    form = StreamFormat("grpc", "Generate")
    streams.open_stream(generation, batches(), form).close()  # type: ignore[arg-type]  # a stand-in
    return streams


@in_virtual_time
async def test_stream_outlives_a_pause_of_the_server() -> None:
    streams = _kept_stream(grace_s=5.0)
    await asyncio.sleep(1.0)
    pass_time(60.0)
    await asyncio.sleep(1.0)
    assert streams.resume_stream("", "call", 0, protocol="grpc") is not None
    other = _kept_stream(grace_s=5.0)
    await asyncio.sleep(6.0)
    with pytest.raises(UnknownStreamError):
        other.resume_stream("", "call", 0, protocol="grpc")
    streams.close()
