"""A model as a Python object: `LLM(folder).generate(prompts, params)`."""

from __future__ import annotations

import asyncio
import operator
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import msgspec
from tqdm import tqdm

from cluster.controller import Controller
from cluster.embedder import Embedder
from cluster.executor import make_executor
from cluster.options import EngineOptions, engine_config
from cluster.progress import ProgressLine
from cluster.serving.chat_template import ChatMessage
from cluster.serving.inputs import ChatPrompt, GenerationInput, Prompt
from cluster.serving.text_stream import SequenceOutput, TextStream
from cluster.serving.tokenizer import Tokenizer, read_tokenizer
from cluster.serving.validator import Validator
from pagedray.batch import TokenLogprobs
from pagedray.errors import EngineError, InvalidRequestError, OverloadedError
from pagedray.request import FinishReason, Request, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence
    from pathlib import Path
    from types import TracebackType

    from cluster.engine_stats import EngineStats
    from cluster.scheduling.event import TokenEvent
    from pagedray.batch import Pooling

__all__ = ["LLM", "Completion", "Generation"]

_HELD_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished continuation."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    """The end-of-sequence or stop token included."""
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Empty, or one for each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A prompt and its continuations."""

    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    num_cached_tokens: int = 0
    """Tokens of the prompt that the prefix cache spared."""


class LLM:
    """A model and the engine that runs it, in this process or on Ray actors.

    `options` are the fields of `cluster.options.EngineOptions`, such as
    `tensor_parallel_size`, `executor`, `num_blocks` and `dtype`. Raises StartupError.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        show_progress: bool = True,
        # Any: each option has a type of its own, which EngineOptions states.
        **options: Any,
    ) -> None:
        config = engine_config(model, EngineOptions(**options))
        reader = None
        if config.model.is_encoder:
            # Ours writes texts too, and serves no tokenizer that cannot.
            reader = read_tokenizer(config.model.folder)
        else:
            self._tokenizer = Tokenizer.from_folder(config.model.folder)
            self._validator = Validator(config, self._tokenizer)
        self._sink = _Sink()
        line = ProgressLine()
        try:
            self._executor = make_executor(
                config, line.report if show_progress else lambda what, fraction: None
            )
        finally:
            line.close()
        self._controller = Controller(config, self._executor, self._sink)
        self._embedder: Embedder | None = None
        if reader is not None:
            self._embedder = Embedder(config, self._executor, reader)
        else:
            self._controller.start()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = True,
    ) -> list[Generation]:
        """Return the continuations of each prompt, a text or its token ids, in order.

        `params` is one for all prompts or one for each. Raises InvalidRequestError if a prompt
        or a parameter is at fault, and EngineError if the engine fails; nothing goes on then.
        """
        given: list[Prompt] = [
            prompt if isinstance(prompt, str) else tuple(prompt)
            for prompt in ([prompts] if isinstance(prompts, str) else prompts)
        ]
        return self._run(given, params, show_progress)

    def chat(
        self,
        messages: Sequence[dict[str, str]],
        params: SamplingParams | None = None,
        *,
        show_progress: bool = False,
    ) -> Generation:
        """Return how the assistant goes on with a conversation of `role` and `content`."""
        return self._run([_conversation(messages)], params, show_progress)[0]

    def stream(
        self, prompt: str | Sequence[int] | Sequence[dict[str, str]], params: SamplingParams
    ) -> Generator[str]:
        """Yield the text of one continuation as it grows; `params.n` must be 1."""
        if params.n != 1:
            raise InvalidRequestError(f"n must be 1 to stream, not {params.n}.", param="n")
        (request,) = self._validated([_as_prompt(prompt)], [params])
        collector = _Collector(request, self._tokenizer)
        buffer = self._sink.open([request], is_watched=True)
        try:
            self._controller.submit(request)
            while not collector.is_finished:
                for event in buffer.take():
                    if text := self._push(collector, event).text:
                        yield text
        finally:
            self._controller.abort(request.id)
            self._sink.close([request])

    def embed(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        pooling: Pooling = "mean",
        normalize: bool = True,
    ) -> list[list[float]]:
        """Return the vector of each prompt, a text or its token ids, in order.

        `pooling` says of which tokens: the mean of all, or the first (`cls`), or the last;
        `normalize` scales vectors to length 1. Raises InvalidRequestError if a prompt is at fault
        or the model is no encoder, and EngineError if the engine fails.
        """
        if self._embedder is None:
            raise InvalidRequestError("The model generates texts; only an encoder embeds them.")
        given = [prompts] if isinstance(prompts, str) else prompts
        return self._embedder.embed(given, pooling, is_normalized=normalize)

    def stats(self) -> EngineStats:
        """Return the engine's counts of this moment."""
        return self._controller.stats()

    def close(self) -> None:
        """End the engine and its ranks. May be called twice."""
        self._controller.stop()
        self._executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        show_progress: bool,
    ) -> list[Generation]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidRequestError(
                f"{len(params)} sampling parameters do not fit {len(prompts)} prompts."
            )
        requests = self._validated(prompts, params)
        collectors = {request.id: _Collector(request, self._tokenizer) for request in requests}
        # A stop string is only found by looking.
        is_watched = any(request.sampling.stop for request in requests)
        buffer = self._sink.open(requests, is_watched=is_watched)
        try:
            self._collect(collectors, requests, buffer, show_progress)
        except BaseException:
            for request in requests:
                self._controller.abort(request.id)
            raise
        finally:
            self._sink.close(requests)
        return [collectors[request.id].generation() for request in requests]

    def _validated(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> list[Request]:
        if self._embedder is not None:
            raise InvalidRequestError("The model is an encoder; it embeds texts, with `embed`.")

        async def validate() -> list[Request]:
            requests: list[Request] = []
            for prompt, sampling in zip(prompts, params, strict=True):
                given = GenerationInput(
                    prompts=(prompt,), sampling=msgspec.structs.asdict(sampling)
                )
                requests += await self._validator.validate(given)
            return requests

        # A thread of its own: the caller's may have a running event loop, as in a notebook.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, validate()).result()

    def _collect(
        self,
        collectors: dict[str, _Collector],
        requests: list[Request],
        buffer: _EventBuffer,
        show_progress: bool,
    ) -> None:
        waiting = iter(requests)
        held = self._submit_all(waiting)
        num_open = len(requests)
        with tqdm(total=num_open, unit="prompt", disable=not show_progress) as bar:
            while num_open:
                # A queue that others fill empties without news for this call.
                for event in buffer.take(None if held is None else _HELD_POLL_S):
                    collector = collectors[event.request_id]
                    if collector.is_finished:
                        continue
                    self._push(collector, event)
                    if collector.is_finished:
                        num_open -= 1
                        bar.update()
                if held is not None:
                    held = self._submit_all([held]) or self._submit_all(waiting)

    def _submit_all(self, requests: Iterable[Request]) -> Request | None:
        """Submit until the queue is full; return the first request that found no room."""
        for request in requests:
            try:
                self._controller.submit(request)
            except OverloadedError:
                return request
        return None

    def _push(self, collector: _Collector, event: TokenEvent) -> SequenceOutput:
        output = collector.push(event)
        if output.finish_reason is not None and event.finish_reason is None:
            # A stop string ended it; the engine cannot know.
            self._controller.finish(event.request_id, event.index)
        return output


class _EventBuffer:
    """Holds the events of one call until its thread has reason to look at them.

    Waking it for every token would cost the step thread its core and the interpreter's lock, so
    that happens only where a call is watched: where it streams, or looks for stop strings.
    """

    def __init__(self, *, is_watched: bool) -> None:
        self._is_watched = is_watched
        self._events: list[TokenEvent] = []
        self._error: EngineError | None = None
        self._has_news = threading.Condition()

    def put(self, event: TokenEvent) -> None:
        """Take an event."""
        with self._has_news:
            self._events.append(event)
            if self._is_watched or event.finish_reason is not None:
                self._has_news.notify()

    def fail(self, error: EngineError) -> None:
        """End with `error` once the events are taken."""
        with self._has_news:
            self._error = error
            self._has_news.notify()

    def take(self, timeout_s: float | None = None) -> list[TokenEvent]:
        """Wait for news and return all events since the last call. Raises EngineError."""
        with self._has_news:
            self._has_news.wait_for(self._is_worth_waking, timeout_s)
            events, self._events = self._events, []
            if not events and self._error is not None:
                raise self._error
            return events

    def _is_worth_waking(self) -> bool:
        if self._error is not None:
            return True
        if self._is_watched:
            return bool(self._events)
        return any(event.finish_reason is not None for event in self._events)


class _Sink:
    """Hands the events of each request to the call that waits for them."""

    def __init__(self) -> None:
        self._buffers: dict[str, _EventBuffer] = {}
        self._lock = threading.Lock()

    def open(self, requests: Sequence[Request], *, is_watched: bool) -> _EventBuffer:
        """Return the buffer of a call; to be closed."""
        buffer = _EventBuffer(is_watched=is_watched)
        with self._lock:
            self._buffers |= dict.fromkeys((request.id for request in requests), buffer)
        return buffer

    def close(self, requests: Sequence[Request]) -> None:
        """Drop what may still come of a call."""
        with self._lock:
            for request in requests:
                self._buffers.pop(request.id, None)

    def publish(self, events: Sequence[TokenEvent]) -> None:
        with self._lock:
            for event in events:
                buffer = self._buffers.get(event.request_id)
                if buffer is not None:
                    buffer.put(event)

    def fail_all(self, error: EngineError) -> None:
        with self._lock:
            for buffer in self._buffers.values():
                buffer.fail(error)


class _Collector:
    """Gathers the continuations of one request."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._request = request
        self._streams = [
            TextStream(request, index, tokenizer.token_bytes) for index in range(request.sampling.n)
        ]
        self._outputs: list[list[SequenceOutput]] = [[] for _ in self._streams]
        self._num_cached_tokens = 0

    @property
    def is_finished(self) -> bool:
        """Whether every continuation has ended."""
        return all(stream.is_finished for stream in self._streams)

    def push(self, event: TokenEvent) -> SequenceOutput:
        """Return what an event adds."""
        stream = self._streams[event.index]
        if stream.is_finished:
            return SequenceOutput(index=event.index, text="", token_ids=())
        self._num_cached_tokens = max(self._num_cached_tokens, event.num_cached_tokens)
        output = stream.push([event])
        self._outputs[event.index].append(output)
        return output

    def generation(self) -> Generation:
        """Return all of it."""
        return Generation(
            prompt_token_ids=self._request.prompt_token_ids,
            completions=tuple(
                _completion(index, outputs) for index, outputs in enumerate(self._outputs)
            ),
            num_cached_tokens=self._num_cached_tokens,
        )


def _completion(index: int, outputs: Sequence[SequenceOutput]) -> Completion:
    last = outputs[-1]
    assert last.finish_reason is not None
    return Completion(
        index=index,
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=tuple(entry for output in outputs for entry in output.logprobs),
    )


def _as_prompt(prompt: str | Sequence[int] | Sequence[dict[str, str]]) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    # Any: which of the two it is shows in the first item.
    items: list[Any] = list(prompt)
    if items and isinstance(items[0], dict):
        return _conversation(items)
    return tuple(operator.index(item) for item in items)


def _conversation(messages: Sequence[dict[str, str]]) -> ChatPrompt:
    for message in messages:
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise InvalidRequestError(
                f"A message has role and content, not {message!r:.60}.", param="messages"
            )
    return ChatPrompt(tuple(ChatMessage(**message) for message in messages))
