"""The asynchronous Python API: `async for result in AsyncLLM(model).generate(prompt)`."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Iterable, Mapping
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Self, Unpack

from cluster.engine.engine_options import engine_config
from cluster.engine.frozen_heap import CallFreezer
from cluster.engine.open_engine import open_engine
from cluster.engine.progress import progress_reports
from cluster.engine.vllm_options import engine_options
from cluster.llm.generation import BeamSearches, BeamSearchParams, Collector, first_logprobs
from cluster.llm.options import ExitClose, PublicLLM, with_vllm_arguments
from cluster.llm.prompts import RequestMaker, check_params, read_conversations, read_prompts
from cluster.llm.sampling_params import RequestOutputKind, SamplingParams
from cluster.serving.beam_search import check_beams_fit
from cluster.serving.engine_client import EngineClient
from cluster.serving.prompt_reader import check_unicode
from cluster.serving.text.text_pool import TextPool
from cluster.serving.text.tokenizer import Tokenizer
from cluster.serving.validator import Validator
from pagedray.errors import (
    DuplicateIdError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    StartupError,
    invalid_field,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from pathlib import Path

    from cluster.engine.engine_loop import EngineLoop
    from cluster.engine.stats import EngineStats
    from cluster.llm.generation import BeamSearchOutput, Generation
    from cluster.llm.options import LLMOptions
    from cluster.llm.prompts import Conversation, GivenPrompt, SaltedPrompt
    from cluster.scheduling.event import TokenEvent
    from cluster.serving.engine_client import EngineStream
    from pagedray.batch import TokenLogprobs
    from pagedray.request import Request
    from pagedray.sampling_params import SamplingParams as RequestParams

__all__ = ["AsyncLLM"]

_SHUT_DOWN = "The AsyncLLM is shut down; create another one."
_HELD_POLL_S = 0.05


class AsyncLLM(PublicLLM):
    """A model and its engine for one event loop, with continuous batching of concurrent requests.

    Accepts the same model and options as `LLM`, and loads the model before it returns. The first
    request binds it to its event loop. Raises StartupError for an option that is not supported, or
    a model that does not generate text.
    """

    _CLOSE = "shutdown"

    def __init__(
        self,
        model: str | Path,
        *,
        seed: int | None = None,
        show_progress: bool = True,
        **options: Unpack[LLMOptions],
    ) -> None:
        own = engine_options({"seed": seed, **options})
        with progress_reports(are_shown=show_progress) as report:
            config = engine_config(model, own, report)
            if config.model.task != "generate":
                raise StartupError(
                    "AsyncLLM generates text; use LLM for models that embed or score."
                )
            self._config = config
            self._tokenizer = Tokenizer.from_config(config)
            # Each text waits for its turn: a rejected text would be read again and again.
            text_pool = TextPool(max_waiting=sys.maxsize)
            self._validator = Validator(config, self._tokenizer, text_pool=text_pool)
            self._requests = RequestMaker(self._validator, config)
            self._queue_limits = config.scheduler
            self._sink = _Sink()
            self._freezer = CallFreezer()
            engine = open_engine(config, self._sink, report)
        self._engine = engine
        self._exit_close = ExitClose(engine.close)
        self._streams: dict[str, EngineStream | None] = {}
        """Streams by the ids of their requests; None until a request has entered the queue."""
        self._aborted: set[str] = set()
        """Ids of requests that were aborted before their streams were opened."""
        self._is_shut_down = False
        self._turns = asyncio.Lock()
        """Held by the call that enters the queue next."""

    @with_vllm_arguments
    async def generate(
        self,
        prompt: GivenPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[Generation]:
        """Yield results while they are generated; the last one is finished.

        A prompt is a text, a list of token ids, or a dictionary as for `LLM.generate`. By default,
        each result has all tokens so far. If `output_kind` of the parameters is DELTA, it has the
        tokens since the previous result; if it is FINAL_ONLY, there is a single result. If
        `request_id` is None, the id is random.

        Cancelling the task, or closing the generator, aborts the request. While the queue is full,
        the request waits. Raises InvalidRequestError for an invalid prompt or parameter,
        DuplicateIdError for a `request_id` that is in use, and EngineError if the engine fails.
        """
        prompts = read_prompts(prompt, "prompt")
        if len(prompts) != 1:
            raise InvalidRequestError(
                "generate() takes one prompt; call it once for each.", param="prompt"
            )
        async with aclosing(self._generate(prompts[0], sampling_params, request_id)) as results:
            async for result in results:
                yield result

    @with_vllm_arguments
    async def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> AsyncGenerator[Generation]:
        """Yield the assistant's reply to a conversation, as in `generate` and `LLM.chat`."""
        conversations = read_conversations(
            messages,
            tools=tools,
            adds_generation_prompt=add_generation_prompt,
            continues_final_message=continue_final_message,
            variables=chat_template_kwargs,
            template=chat_template,
        )
        if len(conversations) != 1:
            raise InvalidRequestError(
                "chat() takes one conversation; call it once for each.", param="messages"
            )
        work = self._generate(conversations[0], sampling_params, request_id)
        async with aclosing(work) as results:
            async for result in results:
                yield result

    @with_vllm_arguments
    async def beam_search(self, prompt: GivenPrompt, params: BeamSearchParams) -> BeamSearchOutput:
        """Return the result of a beam search for a prompt.

        Takes the prompts and raises the errors of `generate`. Cancelling the task aborts the
        search.
        """
        prompts = read_prompts(prompt, "prompt")
        if len(prompts) != 1:
            raise InvalidRequestError(
                "beam_search() takes one prompt; call it once for each.", param="prompt"
            )
        check_params(params, BeamSearchParams, "params")
        client = self._client()
        with self._freezer.freeze():
            start = await self._validated(prompts[0], params.sampling)
            check_beams_fit([start], params.beam_width, self._queue_limits, param="beam_width")
            searches = BeamSearches([start], params)
            while requests := searches.step_requests():
                searches.take_step(await self._likeliest(client, requests))
        (output,) = searches.outputs(self._tokenizer)
        return output

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort requests by their ids; unknown ids are ignored.

        The last result of an aborted request has the finish reason `abort`. Raises
        InvalidRequestError, and aborts none, if an id is not a string.
        """
        for one in _ids_of(request_id):
            if (stream := self._streams.get(one)) is not None:
                stream.abort()
            elif one in self._streams:
                self._aborted.add(one)

    async def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer, which has `encode` and `decode`."""
        return self._tokenizer

    async def check_health(self) -> None:
        """Raise EngineError if the engine has failed."""
        if self._engine.error is not None:
            raise self._engine.error.with_traceback(None)

    def stats(self) -> EngineStats:
        """Return a snapshot of the engine's counters."""
        return self._engine.stats()

    def shutdown(self) -> None:
        """Stop the engine and its ranks.

        Running requests end with EngineError. Further calls have no effect.
        """
        self._is_shut_down = True
        self._exit_close.cancel()
        self._sink.fail_all(EngineError("The engine was shut down."))
        self._engine.close(EngineError(_SHUT_DOWN))
        self._validator.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        # It waits for processes.
        await asyncio.to_thread(self.shutdown)

    def _client(self) -> EngineClient:
        if self._is_shut_down:
            raise EngineError(_SHUT_DOWN)
        return self._sink.client_of(asyncio.get_running_loop(), self._engine)

    async def _generate(
        self, prompt: SaltedPrompt, params: SamplingParams | None, given_id: str | None
    ) -> AsyncGenerator[Generation]:
        if params is None:
            params = self._requests.default_params
        check_params(params, SamplingParams, "sampling_params")
        if given_id is not None:
            _check_id(given_id)
        client = self._client()
        request_id = secrets.token_hex(16) if given_id is None else given_id
        if request_id in self._streams:
            raise DuplicateIdError(request_id)
        self._streams[request_id] = None
        try:
            with self._freezer.freeze():
                request = await self._validated(prompt, params)
                collector = Collector(
                    request,
                    self._tokenizer,
                    request_id=request_id,
                    prompt=prompt.value if isinstance(prompt.value, str) else None,
                    params=params,
                )
                # One call at a time looks for room: thousands that do keep the event loop busy.
                async with self._turns:
                    opened = await _opened(client, [request])
                async with opened as stream:
                    self._streams[request_id] = stream
                    if request_id in self._aborted:
                        stream.abort()
                    async with aclosing(_results(stream, collector, params.output_kind)) as results:
                        async for result in results:
                            yield result
        finally:
            del self._streams[request_id]
            self._aborted.discard(request_id)

    async def _likeliest(
        self, client: EngineClient, requests: Sequence[Request]
    ) -> list[TokenLogprobs]:
        """Return the most likely tokens after each request."""
        collectors = {one.id: Collector(one, self._tokenizer) for one in requests}
        async with await _opened(client, requests) as stream:
            async for events in stream:
                for event in events:
                    collectors[event.request_id].push_events([event])
        return [first_logprobs(collectors[one.id].generation()) for one in requests]

    async def _validated(self, prompt: SaltedPrompt, params: RequestParams) -> Request:
        sampled = self._requests.sample([prompt], params)
        while True:
            # Not too many structures may be compiled at once.
            with suppress(OverloadedError):
                (request,) = await self._requests.make(sampled)
                return request
            await asyncio.sleep(_HELD_POLL_S)


def _check_id(given: object) -> None:
    if not isinstance(given, str) or not given:
        raise invalid_field("request_id", f"must be a non-empty string, not {given!r:.80}.")
    check_unicode(given, "request_id")


def _ids_of(given: object) -> list[str]:
    """Return one id, or several, as a list. Raises InvalidRequestError."""
    ids: list[object] = [given]
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping):
        ids = list(given)
    found = [one for one in ids if isinstance(one, str)]
    if len(found) < len(ids):
        wrong = next(one for one in ids if not isinstance(one, str))
        raise invalid_field("request_id", f"must be a string or several, not {wrong!r:.80}.")
    return found


class _Sink:
    """Events of the engine, for the event loop of its first request."""

    def __init__(self) -> None:
        self._client: EngineClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def client_of(self, loop: asyncio.AbstractEventLoop, engine: EngineLoop) -> EngineClient:
        """Return the client of a loop. Raises InvalidRequestError for a second loop."""
        if self._client is None:
            self._loop = loop
            self._client = EngineClient(loop)
            self._client.attach_engine(engine)
        if loop is not self._loop:
            raise InvalidRequestError(
                "AsyncLLM belongs to the event loop of its first request; use LLM for several."
            )
        return self._client

    def publish(self, events: Sequence[TokenEvent]) -> None:
        if self._client is not None:
            self._client.publish(events)

    def fail_all(self, error: EngineError) -> None:
        if self._client is not None:
            self._client.fail_all(error)


async def _opened(client: EngineClient, requests: Sequence[Request]) -> EngineStream:
    """Submit requests as soon as the queue has room, and return their stream."""
    while True:
        with suppress(OverloadedError):
            return client.open_stream(requests)
        await asyncio.sleep(_HELD_POLL_S)


async def _results(
    stream: EngineStream, collector: Collector, kind: RequestOutputKind
) -> AsyncGenerator[Generation]:
    is_delta = kind is RequestOutputKind.DELTA
    async for events in stream:
        for event in events:
            output = collector.push_events([event])
            if output.finish_reason is not None and event.finish_reason is None:
                # A stop string ended it, which the engine does not see.
                stream.finish_sequence(event.request_id, event.index)
        if collector.is_finished or kind is not RequestOutputKind.FINAL_ONLY:
            yield collector.take_delta() if is_delta else collector.generation()
