"""The interface of a load test's clients: their requests, and their records of the answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

from pagedray.errors import PagedRayError

__all__ = ["KEY_VARIABLES", "BenchClient", "BenchError", "BenchRequest", "Timing"]

KEY_VARIABLES = "PAGEDRAY_API_KEY or OPENAI_API_KEY"
"""Where the key is read from without --api-key-file, as messages say it."""

_SHOWN_CHARACTERS = 200


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
    async def close(self) -> None:
        """Close the connections of the client."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
