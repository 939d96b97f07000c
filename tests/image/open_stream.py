"""Clients that read a stream of a completion to its end, over HTTP and gRPC."""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import grpc
import httpx

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["GrpcStream", "HttpStream", "OpenStream"]

_PROMPT = "import os"
_TIMEOUT_S = 120.0


class OpenStream(ABC):
    """A stream that a thread reads."""

    def __init__(self) -> None:
        self.flows = threading.Event()
        """Set when the first tokens have come."""
        self.ended_s = 0.0
        """When the stream had been read to its end."""

    @abstractmethod
    def read(self, num_tokens: int) -> int:
        """Read the stream to its end and return the number of tokens that its usage states."""


class HttpStream(OpenStream):
    """A stream of server-sent events."""

    def __init__(self, address: str, key: str) -> None:
        super().__init__()
        self._url = f"http://{address}:8000/v1/completions"
        self._headers = {"Authorization": f"Bearer {key}"}

    def read(self, num_tokens: int) -> int:
        body = {
            "model": "tiny-llama",
            "prompt": _PROMPT,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with httpx.stream(
            "POST", self._url, json=body, headers=self._headers, timeout=_TIMEOUT_S
        ) as answer:
            *_, usage, end = self._events(answer)
        self.ended_s = time.monotonic()
        assert end == "[DONE]"
        return int(json.loads(usage)["usage"]["completion_tokens"])

    def _events(self, answer: httpx.Response) -> Iterator[str]:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                self.flows.set()
                yield line.removeprefix("data: ")


class GrpcStream(OpenStream):
    """A call of Generate."""

    def __init__(self, address: str, key: str) -> None:
        super().__init__()
        self._address = f"{address}:9000"
        self._metadata = (("authorization", f"Bearer {key}"),)

    def read(self, num_tokens: int) -> int:
        sampling = pb.SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        request = pb.GenerateRequest(text=_PROMPT, sampling=sampling)
        with grpc.insecure_channel(self._address) as channel:
            stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
            for message in stub.Generate(request, metadata=self._metadata, timeout=_TIMEOUT_S):
                self.flows.set()
                last = message
        self.ended_s = time.monotonic()
        return int(last.usage.num_generated_tokens)
