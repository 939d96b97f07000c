"""Clients that stream over gRPC from a server in another process."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import grpc
import httpx
import psutil

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.fakes import wait_for
from tests.process_ends import still_running
from tests.system.server_process import ServerProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcStream:
    """How one stream ended."""

    num_tokens: int
    end: str
    """The finish reason or the gRPC code; empty if the stream ended without either."""
    token_ids: tuple[int, ...] = field(default=(), compare=False)


class GrpcStreams:
    """Greedy streams of `num_tokens` tokens each, read by threads. A context manager."""

    def __init__(
        self,
        server: ServerProcess,
        *,
        num_streams: int,
        num_tokens: int,
        key: str = "",
        texts: Sequence[str] = ("def read(path):",),
    ) -> None:
        """The streams take the prompts in turn."""
        self._metadata = [("authorization", f"Bearer {key}")] if key else []
        self._channel = grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}")
        self._service = pagedray_pb2_grpc.GenerationServiceStub(self._channel)
        self._sampling = pb.SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
        self._readers = ThreadPoolExecutor(num_streams)
        self._texts = [texts[index % len(texts)] for index in range(num_streams)]
        self._flowing = [threading.Event() for _ in range(num_streams)]
        self._streams: list[Future[GrpcStream]] = []

    def start(self, timeout_s: float = 60.0) -> None:
        """Start the streams and wait until each has received tokens."""
        self._streams = [
            self._readers.submit(self._read, *pair)
            for pair in zip(self._texts, self._flowing, strict=True)
        ]
        for event in self._flowing:
            assert event.wait(timeout_s)

    def ended(self, timeout_s: float) -> list[GrpcStream]:
        """Wait for the end of every stream."""
        return [stream.result(timeout_s) for stream in self._streams]

    def finished_tokens(self, timeout_s: float = 120.0) -> list[tuple[int, ...]]:
        """Wait until all streams have all their tokens, and return them."""
        ended = self.ended(timeout_s)
        assert {stream.end for stream in ended} == {"FINISH_REASON_LENGTH"}
        return [stream.token_ids for stream in ended]

    def num_running(self) -> int:
        """Return the number of streams that have not ended."""
        return sum(not stream.done() for stream in self._streams)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._readers.shutdown()

    def _read(self, text: str, flowing: threading.Event) -> GrpcStream:
        request = pb.GenerateRequest(text=text, sampling=self._sampling)
        token_ids: list[int] = []
        end = ""
        try:
            for answer in self._service.Generate(request, metadata=self._metadata):
                for sequence in answer.sequences:
                    token_ids += sequence.token_ids
                    if sequence.finish_reason:
                        end = pb.FinishReason.Name(sequence.finish_reason)
                flowing.set()
        except grpc.RpcError as error:
            end = error.code().name
        return GrpcStream(num_tokens=len(token_ids), end=end, token_ids=tuple(token_ids))


NUM_STREAMS = 16
FINISHED = GrpcStream(num_tokens=100, end="FINISH_REASON_LENGTH")


def check_streams_finish(
    server: ServerProcess, log: Path, break_ray: Callable[[], object], *, reason: str
) -> None:
    """Break Ray; the streams must finish, and the server exit to be restarted."""
    family, num_logged = server.family(), len(log.read_text())
    with GrpcStreams(server, num_streams=NUM_STREAMS, num_tokens=100) as streams:
        streams.start()
        break_ray()
        # The server may even have exited.
        wait_for(lambda: not _is_ready(server), 10.0)
        assert streams.ended(60.0) == [FINISHED] * NUM_STREAMS
    # A supervisor restarts what fails.
    assert server.wait(60.0) == 1
    logged = log.read_text()[num_logged:].splitlines()
    lines = [line for line in logged if not line.endswith(" ...")]
    assert [reason in line for line in lines] == [True], lines
    assert_ended(family)


def assert_ended(processes: list[psutil.Process]) -> None:
    """Fail unless the processes end within a minute."""
    assert still_running(processes, 60.0) == []


def _is_ready(server: ServerProcess) -> bool:
    try:
        return server.is_ready()
    except httpx.TransportError:
        return False
