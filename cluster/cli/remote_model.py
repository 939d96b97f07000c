"""A model of a running server, with which `pagedray generate` and `pagedray chat` talk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from cluster.cli.server_connection import ServerConnection, UnreachableError
from pagedray.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from pathlib import Path

__all__ = ["DEFAULT_URL", "RemoteModel"]

DEFAULT_URL = "http://127.0.0.1:8000"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Message(msgspec.Struct):
    message: str


class _Answer(msgspec.Struct):
    """A completion, or a chunk of a stream."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Message | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class RemoteModel:
    """Generates text on a server with an OpenAI-compatible API."""

    def __init__(
        self,
        url: str | None,
        name: str | None,
        given: Mapping[str, Any],  # Any: values of several fields
        *,
        key: str | None,
        ca_file: Path | None,
    ) -> None:
        """Connect to `url`, or to the server on this machine; `name` is by default its first model.

        `given` are the sampling parameters that the user sets. Raises PagedRayError.
        """
        self._server = ServerConnection(
            url or DEFAULT_URL, key=key, ca_file=ca_file, kind="an OpenAI-compatible server"
        )
        try:
            models = self._server.get("/v1/models", _Models).data
        except UnreachableError as error:
            if url is not None:
                raise
            raise EngineError(
                f"No server is running at {DEFAULT_URL}. Start one with `pagedray serve MODEL`, "
                "name another one with --url, or name a model to load."
            ) from error
        if not models and name is None:
            raise EngineError(f"{self._server.url} serves no model.")
        self.name = name or models[0].id
        self.url = self._server.url
        self.num_tokens = 0
        """Number of tokens that the last stream has generated."""
        self.is_cut = False
        """Whether `max_tokens` ended the last stream."""
        self._fields: dict[str, Any] = {"model": self.name, **given}

    @property
    def has_chat_template(self) -> bool:
        """Whether the model can chat; a server rejects messages if it cannot."""
        return True

    def stream(
        self, prompt: str | Sequence[Mapping[str, str]]
    ) -> Generator[tuple[str, bool], None, None]:
        """Yield the parts of a completion or an answer, and whether each is reasoning.

        Raises EngineError, and InvalidRequestError if the server rejects the prompt.
        """
        self.num_tokens, self.is_cut = 0, False
        is_text = isinstance(prompt, str)
        path = "/v1/completions" if is_text else "/v1/chat/completions"
        body = self._fields | {
            "prompt" if is_text else "messages": prompt,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for data in self._server.stream(path, body):
            try:
                chunk = msgspec.json.decode(data, type=_Answer)
            except msgspec.MsgspecError as error:
                raise EngineError(f"The server sent an invalid event: {error}.") from error
            if chunk.error is not None:
                raise EngineError(chunk.error.message)
            if chunk.usage is not None:
                self.num_tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                delta = choice.delta or _Delta()
                reasoning, text = delta.reasoning_content or delta.reasoning, delta.content
                self.is_cut = self.is_cut or choice.finish_reason == "length"
                text = text or choice.text
                # An answer that is stopped has no usage.
                self.num_tokens += chunk.usage is None and bool(text or reasoning)
                if reasoning:
                    yield reasoning, True
                if text:
                    yield text, False

    def complete(self, text: str) -> dict[str, Any]:  # Any: JSON values
        """Return the completion of a text as the object that `--json` prints, without times."""
        body = self._fields | {"prompt": text, "return_token_ids": True}
        answer = self._server.post("/v1/completions", body, _Answer)
        choice, usage = answer.choices[0], answer.usage or _Usage()
        return {
            "prompt": text,
            "text": choice.text or "",
            "token_ids": choice.token_ids or [],
            "finish_reason": choice.finish_reason,
            "num_prompt_tokens": usage.prompt_tokens,
            "num_generated_tokens": usage.completion_tokens,
        }

    def close(self) -> None:
        """Close the connection."""
        self._server.close()
