"""The Python API: `LLM(model).generate(prompts, params)`."""

from __future__ import annotations

import asyncio
import operator
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec
from tqdm import tqdm

from cluster.engine.controller import Controller
from cluster.engine.embedder import Embedder
from cluster.engine.event_buffers import EventBuffer, EventDispatcher
from cluster.engine.open_engine import open_engine
from cluster.engine.options import EngineOptions, engine_config, refuse_remote_code
from cluster.engine.progress import ProgressLine
from cluster.generation import Collector, Completion, Generation
from cluster.serving.embedding_validator import MAX_PROMPTS, EmbeddingValidator
from cluster.serving.inputs import ChatPrompt, EmbeddingInput, GenerationInput, Prompt, ScoreInput
from cluster.serving.score_validator import MAX_PAIRS, ScoreValidator
from cluster.serving.text.chat_template import ChatMessage
from cluster.serving.text.tokenizer import Tokenizer
from cluster.serving.validator import Validator
from pagedray.errors import InvalidRequestError, OverloadedError
from pagedray.request import Request, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator, Iterable, Sequence
    from concurrent.futures import Future
    from pathlib import Path
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from cluster.engine.embedding_job import EmbeddingRequest
    from cluster.engine.executor import ReportProgress
    from cluster.engine.stats import EngineStats
    from cluster.scheduling.event import TokenEvent
    from cluster.serving.text.text_stream import SequenceOutput
    from pagedray.batch import Pooling
    from pagedray.config import EngineConfig, Task

__all__ = ["LLM", "Completion", "Generation"]

_HELD_POLL_S = 0.05

_VALIDATORS: dict[Task, type[Validator | EmbeddingValidator | ScoreValidator]] = {
    "generate": Validator,
    "embed": EmbeddingValidator,
    "score": ScoreValidator,
}

Result = TypeVar("Result")


class LLM:
    """A model and its engine, in this process or on Ray actors.

    `model` is a folder, or a Hub id such as `org/name` or `org/name@revision`. `options` are the
    fields of `cluster.engine.options.EngineOptions`, such as `tensor_parallel_size`, `executor`,
    `num_blocks` and `dtype`. Raises StartupError.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        show_progress: bool = True,
        # Any: EngineOptions states the type of each option.
        **options: Any,
    ) -> None:
        refuse_remote_code(options)
        line = ProgressLine()
        report = line.report if show_progress else _ignore_progress
        try:
            self._open(engine_config(model, EngineOptions(**options), report), report)
        finally:
            line.close()

    def _open(self, config: EngineConfig, report_progress: ReportProgress) -> None:
        self._tokenizer = Tokenizer.from_folder(config.model.folder, pools=config.model.pools)
        kind = _VALIDATORS[config.model.task]
        self._validator = kind(config, self._tokenizer)
        self._sink = EventDispatcher()
        self._engine = open_engine(config, self._sink, report_progress)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = True,
    ) -> list[Generation]:
        """Return the completions of each prompt, which is a text or its token ids, in order.

        `params` applies to all prompts, or is a list of one per prompt. Raises InvalidRequestError
        for an invalid prompt or parameter, and EngineError if the engine fails; all requests of
        the call are aborted then.
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
        """Return the assistant's reply to a conversation of messages with `role` and `content`."""
        return self._run([_conversation(messages)], params, show_progress)[0]

    def stream(
        self, prompt: str | Sequence[int] | Sequence[dict[str, str]], params: SamplingParams
    ) -> Generator[str]:
        """Yield the text of one completion as it is generated; `params.n` must be 1."""
        if params.n != 1:
            raise InvalidRequestError(f"n must be 1 for streaming, not {params.n}.", param="n")
        (request,) = self._validated([_as_prompt(prompt)], [params])
        collector = Collector(request, self._tokenizer)
        buffer = self._sink.open_buffer([request], is_watched=True)
        try:
            self._controller.submit_request(request)
            while not collector.is_finished:
                for event in buffer.take_events():
                    if text := self._push(collector, event).text:
                        yield text
        finally:
            self._controller.abort_request(request.id)
            self._sink.close_buffer([request])

    def embed(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
    ) -> list[list[float]]:
        """Return the embedding of each prompt, which is a text or its token ids, in order.

        `pooling` is the mean of all tokens, the first one (`cls`) or the last; None is the model's
        own. `normalize` scales vectors to length 1. Raises InvalidRequestError for an invalid
        prompt or if the model generates text, and EngineError if the engine fails.
        """
        validator = self._validator
        if not isinstance(validator, EmbeddingValidator):
            raise InvalidRequestError('embed() requires task="embed".')
        given = [prompts] if isinstance(prompts, str) else prompts
        texts = [text if isinstance(text, str) else tuple(text) for text in given]
        vectors: list[list[float]] = []
        for first in range(0, len(texts), MAX_PROMPTS):
            part = EmbeddingInput(
                prompts=tuple(texts[first : first + MAX_PROMPTS]),
                pooling=pooling,
                is_normalized=normalize,
            )
            request = _run_apart(validator.validate(part))
            vectors += _submitted(self._embedder, request).result().tolist()
        return vectors

    def score(self, queries: str | Sequence[str], documents: str | Sequence[str]) -> list[float]:
        """Return the relevance of each document to its query, in order; higher is more relevant.

        `queries` is one text for all documents, or a list of one per document. Raises
        InvalidRequestError for an invalid text or if the model is not a cross-encoder, and
        EngineError if the engine fails.
        """
        validator = self._validator
        if not isinstance(validator, ScoreValidator):
            raise InvalidRequestError("The model is not a cross-encoder, and score() requires one.")
        others = [documents] if isinstance(documents, str) else list(documents)
        firsts = [queries] * len(others) if isinstance(queries, str) else list(queries)
        if len(firsts) != len(others):
            raise InvalidRequestError(
                f"queries must have one entry per document, {len(others)}, not {len(firsts)}.",
                param="queries",
            )
        scores: list[float] = []
        for first in range(0, len(others), MAX_PAIRS):
            part = slice(first, first + MAX_PAIRS)
            given = ScoreInput(
                pairs=tuple(zip(firsts[part], others[part], strict=True)),
                params=("queries", "documents"),
            )
            request = _run_apart(validator.validate(given))
            scores += _submitted(self._embedder, request).result()[:, 0].tolist()
        return scores

    def stats(self) -> EngineStats:
        """Return a snapshot of the engine's counters."""
        return self._engine.stats()

    def close(self) -> None:
        """End the engine and its ranks. May be called twice."""
        self._engine.close()
        if isinstance(self._validator, Validator):
            self._validator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _controller(self) -> Controller:
        """The engine, which is a Controller if the model generates text."""
        assert isinstance(self._engine, Controller)
        return self._engine

    @property
    def _embedder(self) -> Embedder:
        """The engine, which is an Embedder if the model does not generate text."""
        assert isinstance(self._engine, Embedder)
        return self._engine

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
                f"params must have one entry per prompt, {len(prompts)}, not {len(params)}."
            )
        requests = self._validated(prompts, params)
        collectors = {request.id: Collector(request, self._tokenizer) for request in requests}
        # Stop strings must be looked for as tokens arrive.
        is_watched = any(request.sampling.stop for request in requests)
        buffer = self._sink.open_buffer(requests, is_watched=is_watched)
        try:
            self._collect(collectors, requests, buffer, show_progress)
        except BaseException:
            for request in requests:
                self._controller.abort_request(request.id)
            raise
        finally:
            self._sink.close_buffer(requests)
        return [collectors[request.id].generation() for request in requests]

    def _validated(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> list[Request]:
        validator = self._validator
        if not isinstance(validator, Validator):
            raise InvalidRequestError("The model does not generate text; use embed() or score().")

        async def validate() -> list[Request]:
            requests: list[Request] = []
            for prompt, sampling in zip(prompts, params, strict=True):
                given = GenerationInput(
                    prompts=(prompt,), sampling=msgspec.structs.asdict(sampling)
                )
                requests += await validator.validate(given)
            return requests

        return _run_apart(validate())

    def _collect(
        self,
        collectors: dict[str, Collector],
        requests: list[Request],
        buffer: EventBuffer,
        show_progress: bool,
    ) -> None:
        waiting = iter(requests)
        held = self._submit_all(waiting)
        num_open = len(requests)
        with tqdm(total=num_open, unit="prompt", disable=not show_progress) as bar:
            while num_open:
                # A queue filled by other calls drains without an event for this one.
                for event in buffer.take_events(None if held is None else _HELD_POLL_S):
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
        """Submit until the queue is full; return the first request that did not fit."""
        for request in requests:
            try:
                self._controller.submit_request(request)
            except OverloadedError:
                return request
        return None

    def _push(self, collector: Collector, event: TokenEvent) -> SequenceOutput:
        output = collector.push_event(event)
        if output.finish_reason is not None and event.finish_reason is None:
            # A stop string ended it, which the engine does not see.
            self._controller.finish_sequence(event.request_id, event.index)
        return output


def _ignore_progress(what: str, fraction: float) -> None:
    pass


def _run_apart(work: Coroutine[None, None, Result]) -> Result:
    """Return the result of a coroutine, which runs in a new thread.

    The caller's thread may have a running event loop, as in a notebook.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def _submitted(embedder: Embedder, request: EmbeddingRequest) -> Future[NDArray[np.float32]]:
    """Submit a request as soon as the queue has room, and return its answer."""
    while True:
        try:
            return embedder.submit_request(request)
        except OverloadedError:
            time.sleep(_HELD_POLL_S)


def _as_prompt(prompt: str | Sequence[int] | Sequence[dict[str, str]]) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    # Any: the type of the first item tells the two apart.
    items: list[Any] = list(prompt)
    if items and isinstance(items[0], dict):
        return _conversation(items)
    return tuple(operator.index(item) for item in items)


def _conversation(messages: Sequence[dict[str, str]]) -> ChatPrompt:
    for message in messages:
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise InvalidRequestError(
                f"A message must have role and content, not {message!r:.60}.", param="messages"
            )
    return ChatPrompt(
        tuple(ChatMessage(message["role"], message["content"]) for message in messages)
    )
