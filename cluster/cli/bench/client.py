"""The load of `pagedray bench serve`: its requests, their timing, and the interface of clients."""

from __future__ import annotations

import asyncio
import math
import random
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, NoReturn, Self
from urllib.parse import urlsplit

from tqdm import tqdm

from pagedray.errors import PagedRayError, StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "GOALS",
    "KEY_VARIABLES",
    "METRICS",
    "Backend",
    "BenchClient",
    "BenchError",
    "BenchRequest",
    "DraftCounts",
    "Load",
    "LoadResult",
    "Target",
    "Timing",
    "send_load",
]

KEY_VARIABLES = "PAGEDRAY_API_KEY or OPENAI_API_KEY"
"""Where the key is read from without --api-key-file, as messages say it."""
_SHOWN_CHARACTERS = 200
METRICS: Mapping[str, str] = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Between tokens",
    "e2el": "End to end",
}
"""Latencies by name. `tpot` is the mean of a request after its first token; `itl` are the times
between its messages, each of which may have several tokens."""
GOALS = ("ttft", "tpot", "e2el")
"""Figures that `--goodput` may limit: each request has a value of them."""
Backend = Literal["openai", "openai-chat", "grpc", "grpc-chat"]
"""`grpc` calls Generate and `grpc-chat` calls Chat of a PagedRay server."""
_PATHS: Mapping[Backend, str] = {
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "grpc": "",
    "grpc-chat": "",
}
_SCHEMES = {False: ("http", "https"), True: ("grpc", "grpcs")}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """A prompt, and how many tokens are to be generated."""

    prompt: str
    num_prompt_tokens: int
    """Tokens of the prompt, with special tokens, as the tokenizer counts them."""
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When the parts of one response arrived, by `time.perf_counter`."""

    started_s: float
    """When the request was sent."""
    arrivals_s: tuple[float, ...]
    """When each message with new text or tokens arrived."""
    ended_s: float
    num_prompt_tokens: int
    """Tokens of the prompt, as the server counted them; 0 if it does not report them."""
    num_generated_tokens: int
    """Generated tokens, as the server counted them, or else the number of messages with text."""


class DraftCounts(NamedTuple):
    """Tokens that a server guessed, since its start or during a test."""

    num_chains: int = 0
    """Sequences with guesses in steps."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Guesses that were right."""

    def since(self, before: DraftCounts) -> DraftCounts:
        """Return the difference of the counters to an earlier reading."""
        return DraftCounts(*(new - old for new, old in zip(self, before, strict=True)))

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens of a sequence with drafts in a step."""
        return 1 + self.num_accepted_tokens / self.num_chains

    @property
    def acceptance_percent(self) -> float:
        """The part of drafts that was right."""
        return 100 * self.num_accepted_tokens / self.num_draft_tokens

    def figures(self) -> dict[str, object]:
        """Return the fields of reports, by vLLM's names; empty without drafts."""
        if self.num_chains <= 0:
            return {}
        return {
            "spec_decode_acceptance_rate": self.acceptance_percent,
            "spec_decode_acceptance_length": self.acceptance_length,
            "spec_decode_num_drafts": self.num_chains,
            "spec_decode_draft_tokens": self.num_draft_tokens,
            "spec_decode_accepted_tokens": self.num_accepted_tokens,
        }

    def rows(self) -> dict[str, str]:
        """Return the rows of tables; empty without drafts."""
        if self.num_chains <= 0:
            return {}
        return {
            "Drafts accepted (%)": f"{self.acceptance_percent:.1f}",
            "Tokens of a sequence with drafts per step": f"{self.acceptance_length:.2f}",
        }


class BenchError(PagedRayError):
    """The server rejected a request, ended its answer early, or could not be reached."""

    def __init__(self, reason: str) -> None:
        line = " ".join("".join(c if c.isprintable() else " " for c in reason).split())
        super().__init__(line[:_SHOWN_CHARACTERS])


class BenchClient(ABC):
    """Sends requests to one server. A context manager."""

    @abstractmethod
    async def open(self, model: str | None) -> str:
        """Connect; return the name of the model, which is the server's first one by default.

        Raises BenchError.
        """

    @abstractmethod
    async def stream(self, request: BenchRequest) -> Timing:
        """Send a request and read its whole answer. Raises BenchError."""

    @abstractmethod
    async def encode(self, text: str) -> list[int]:
        """Return the server's tokens of a text, with special tokens. Raises BenchError."""

    @abstractmethod
    async def decode(self, token_ids: list[int]) -> str:
        """Return the server's text of tokens. Raises BenchError."""

    @abstractmethod
    async def count_drafts(self) -> DraftCounts:
        """Return the guesses since the server started; 0 if it does not report them."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections of the client."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server and the fields that all requests have in common."""

    backend: Backend
    base_url: str
    """Without the path of the endpoint; `/v1` at its end is optional."""
    endpoint: str | None = None
    """The path; None is that of the backend."""
    key: str | None = None
    ca_file: Path | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    temperature: float = 0.0
    ignore_eos: bool = False
    extra_body: Mapping[str, object] = field(default_factory=dict)
    timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        """Validate the fields. Raises StartupError."""
        schemes = _SCHEMES[self.is_grpc]
        shown = repr(self.base_url)
        try:
            parts = urlsplit(self.base_url)
            port = parts.port
        except ValueError as error:
            raise StartupError(f"--base-url {shown:.200} is not a URL: {error}.") from error
        if parts.scheme not in schemes or not parts.hostname or port == 0:
            raise StartupError(
                f"--base-url must look like {schemes[0]}://HOST:PORT for --backend {self.backend}, "
                f"not {shown:.200}."
            )
        if self.is_grpc and (port is None or parts.path.strip("/") or parts.query):
            raise StartupError(
                f"--base-url must be {parts.scheme}://HOST:PORT for --backend {self.backend}, not "
                f"{shown:.200}."
            )
        if self.is_grpc and (self.headers or self.extra_body or self.endpoint):
            raise StartupError("--endpoint, --header and --extra-body require HTTP, not gRPC.")
        if self.endpoint is not None and not self.endpoint.startswith("/"):
            raise StartupError(f"--endpoint must begin with a slash, not {self.endpoint!r:.200}.")
        if self.ca_file is not None and not self.is_encrypted:
            raise StartupError(f"--tls-ca requires {schemes[1]}://, not {shown:.200}.")
        if self.key is not None and not (self.key.isascii() and self.key.isprintable()):
            raise StartupError("The API key must be a single line of printable ASCII.")

    @property
    def is_grpc(self) -> bool:
        """Whether requests are sent over gRPC."""
        return self.backend.startswith("grpc")

    @property
    def is_chat(self) -> bool:
        """Whether requests are conversations."""
        return self.backend.endswith("-chat")

    @property
    def is_encrypted(self) -> bool:
        """Whether the connection uses TLS."""
        return urlsplit(self.base_url).scheme in ("https", "grpcs")

    @property
    def address(self) -> str:
        """The host and the port of a gRPC server."""
        return urlsplit(self.base_url).netloc

    @property
    def root(self) -> str:
        """The URL below which `/v1` is."""
        return self.base_url.rstrip("/").removesuffix("/v1")

    @property
    def url(self) -> str:
        """The URL to which requests are sent."""
        return self.root + (self.endpoint or _PATHS[self.backend])

    def tls(self) -> ssl.SSLContext:
        """Return the context that checks the server's certificate. Raises StartupError."""
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            raise StartupError(f"Cannot read --tls-ca {self.ca_file}: {error}.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The rate at which requests are sent, and how many may run at once."""

    request_rate: float = math.inf
    """Requests per second; infinity sends all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of intervals: 1 is a Poisson process, less is burstier."""
    max_concurrency: int | None = None
    """Most requests in flight; others wait, and their times begin when they are sent."""
    seed: int = 0

    def starts_s(self, number: int) -> list[float]:
        """Return when each request is due, in seconds after the first."""
        draws = random.Random(self.seed)
        starts = [0.0]
        for _ in range(number - 1):
            interval = 0.0
            if math.isfinite(self.request_rate):
                scale = 1.0 / (self.request_rate * self.burstiness)
                interval = draws.gammavariate(self.burstiness, scale)
            starts.append(starts[-1] + interval)
        return starts


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The outcome of all requests."""

    timings: tuple[Timing, ...]
    """Timings of the requests that were answered."""
    requests: tuple[BenchRequest, ...]
    """The requests of `timings`, in the same order."""
    failures: tuple[str, ...]
    duration_s: float
    """Time from the first request to the end of the last answer."""
    peak_concurrency: int
    client_cpu_s: float
    """CPU time that this process took."""
    drafts: DraftCounts


class _Sender:
    def __init__(
        self, client: BenchClient, bar: tqdm[NoReturn], max_concurrency: int | None
    ) -> None:
        self._client = client
        self._bar = bar
        self._room = (
            nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        )
        self._num_open = 0
        self.peak = 0
        self.answers: list[tuple[BenchRequest, Timing]] = []
        self.failures: list[str] = []

    async def send(self, request: BenchRequest, delay_s: float) -> None:
        if delay_s > 0.0:
            await asyncio.sleep(delay_s)
        async with self._room:
            self._num_open += 1
            self.peak = max(self.peak, self._num_open)
            try:
                self.answers.append((request, await self._client.stream(request)))
            except BenchError as error:
                self.failures.append(str(error))
                self._bar.set_postfix(failed=len(self.failures), refresh=False)
            finally:
                self._num_open -= 1
                self._bar.update()


async def send_load(
    client: BenchClient, requests: Sequence[BenchRequest], load: Load, *, has_bar: bool | None
) -> LoadResult:
    """Send requests and return when all have ended.

    If `has_bar` is None, a progress bar is shown on a terminal only.
    """
    disabled = None if has_bar is None else not has_bar
    before = await client.count_drafts()
    with tqdm(total=len(requests), unit="request", disable=disabled) as bar:
        sender = _Sender(client, bar, load.max_concurrency)
        cpu_s, began_s = time.process_time(), time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for request, start_s in zip(requests, load.starts_s(len(requests)), strict=True):
                tasks.create_task(sender.send(request, began_s + start_s - time.perf_counter()))
        ended_s, cpu_s = time.perf_counter(), time.process_time() - cpu_s
    return LoadResult(
        timings=tuple(timing for _, timing in sender.answers),
        requests=tuple(request for request, _ in sender.answers),
        failures=tuple(sender.failures),
        duration_s=ended_s - began_s,
        peak_concurrency=sender.peak,
        client_cpu_s=cpu_s,
        drafts=(await client.count_drafts()).since(before),
    )
