"""The Python API: `LLM(model).generate(prompts, params)`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self, Unpack, cast

from tqdm import tqdm

from cluster.engine.engine_options import engine_config
from cluster.engine.event_buffers import EventDispatcher
from cluster.engine.frozen_heap import CallFreezer
from cluster.engine.open_engine import open_engine
from cluster.engine.progress import progress_reports
from cluster.engine.vllm_options import engine_options
from cluster.llm.generation import (
    BeamSearches,
    BeamSearchOutput,
    BeamSearchParams,
    Collector,
    Completion,
    Generation,
    first_logprobs,
)
from cluster.llm.options import ExitClose, PublicLLM, with_vllm_arguments
from cluster.llm.prompts import (
    Conversation,
    GivenPrompt,
    RequestMaker,
    SaltedPrompt,
    SampledPrompt,
    check_params,
    read_conversations,
    read_prompts,
    read_stream_prompt,
    run_apart,
)
from cluster.llm.runner import RequestRunner, embed_prompts, longest_first, read_pairs, score_pairs
from cluster.serving.embedding_validator import EmbeddingValidator, ScoreValidator
from cluster.serving.inputs import EmbeddingInput, ScoreInput
from cluster.serving.text.tokenizer import Tokenizer
from cluster.serving.validator import Validator
from pagedray.errors import EngineError, InvalidRequestError, ShuttingDownError, invalid_field
from pagedray.field_checks import MAX_COUNT, check_bool, check_int
from pagedray.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence
    from pathlib import Path

    from cluster.engine.engine_loop import EngineLoop
    from cluster.engine.executor import ReportProgress
    from cluster.engine.stats import EngineStats
    from cluster.llm.options import LLMOptions
    from cluster.llm.sampling_params import SamplingParams as TextParams
    from pagedray.batch import Pooling
    from pagedray.config import EngineConfig
    from pagedray.model_config import Task
    from pagedray.rank_roofline import RankRoofline
    from pagedray.request import Request

__all__ = ["LLM", "Completion", "Generation"]

_VALIDATORS: dict[Task, type[Validator | EmbeddingValidator | ScoreValidator]] = {
    "generate": Validator,
    "embed": EmbeddingValidator,
    "score": ScoreValidator,
}
_CLOSED = "The LLM is closed; create another one."
_FIRST_PART = 16
"""Number of prompts of a call that are validated before the first of them is submitted."""
_LARGEST_PART = 256
"""Maximum number of prompts that are validated before tokens of running prompts are collected."""


class LLM(PublicLLM):
    """A model and its engine, which runs in this process or on Ray actors.

    `model` is a folder, or a Hub id such as `org/name` or `org/name@revision`. The options are the
    flags of `pagedray serve --help` before the group clients, with underscores, such as
    `tensor_parallel_size`, `executor`, `num_blocks` and `dtype`; a flag such as `--no-prefix-cache`
    is `enable_prefix_cache=False`. vLLM's names and values of these options are accepted, too. If
    `seed` is set, it seeds requests whose parameters have no seed. Raises StartupError for an
    option that is not supported; the error names an alternative.
    """

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
            self._open(engine_config(model, own, report), report)

    def _open(self, config: EngineConfig, report_progress: ReportProgress) -> None:
        self._config = config
        self._vocab_size = config.model.vocab_size
        self._tokenizer = Tokenizer.from_config(config)
        kind = _VALIDATORS[config.model.task]
        self._validator = kind(config, self._tokenizer)
        self._requests = RequestMaker(self._validator, config)
        self._sink = EventDispatcher()
        self._freezer = CallFreezer()
        self._engine = open_engine(config, self._sink, report_progress)
        self._exit_close = ExitClose(self._engine.close)
        self._max_model_len = config.max_model_len
        self._is_closed = False

    @with_vllm_arguments
    def generate(
        self,
        prompts: GivenPrompt | Sequence[GivenPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[Generation]:
        """Return the completions of each prompt, in the order of the prompts.

        A prompt is a text, a list of token ids, or a dictionary with `prompt` or
        `prompt_token_ids`, and optionally `cache_salt`. `sampling_params` applies to all prompts,
        or is a list with one entry per prompt. Prompts with the largest `max_tokens` begin first,
        and run while the others are validated. Raises InvalidRequestError for an invalid prompt or
        parameter, and EngineError if the engine fails; in both cases, all requests of the call are
        aborted.
        """
        with self._freezer.freeze():
            return self._run(read_prompts(prompts), sampling_params, use_tqdm)

    @with_vllm_arguments
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[Generation]:
        """Return the assistant's reply to each conversation, which is a list of messages.

        Messages and `tools` have the format of OpenAI's API. Tool calls are part of the text, in
        the format of the model. Outputs have the reasoning of the model as `reasoning`, and the
        rest of the text as `content`. The reply is a new message, or, with
        `continue_final_message`, the rest of the last one. `chat_template` is a Jinja template that
        replaces the model's, with the variables `chat_template_kwargs`. The other parameters and
        the errors are those of `generate`.
        """
        with self._freezer.freeze():
            given = read_conversations(
                messages,
                tools=tools,
                adds_generation_prompt=add_generation_prompt,
                continues_final_message=continue_final_message,
                variables=chat_template_kwargs,
                template=chat_template,
            )
            return self._run(given, sampling_params, use_tqdm)

    @with_vllm_arguments
    def beam_search(
        self,
        prompts: GivenPrompt | Sequence[GivenPrompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """Return the results of a beam search for each prompt, in the order of the prompts.

        Takes the prompts and raises the errors of `generate`.
        """
        check_params(params, BeamSearchParams, "params")
        given = read_prompts(prompts)
        starts = self._validated(self._requests.sample(given, params.sampling))
        searches = BeamSearches(starts, params)
        with tqdm(total=params.max_tokens, unit="token", disable=not use_tqdm) as bar:
            while requests := searches.step_requests():
                bar.update()
                collectors = [Collector(one, self._tokenizer) for one in requests]
                done = self._runner.complete(
                    [collectors],
                    lengths=[one.sampling.max_tokens for one in requests],
                    is_watched=any(one.sampling.stop for one in requests),
                )
                searches.take_step(map(first_logprobs, done))
        return searches.outputs(self._tokenizer)

    def get_default_sampling_params(self) -> TextParams:
        """Return the default parameters, which the model's generation_config.json may set."""
        return self._requests.default_params

    @property
    def vocab_size(self) -> int:
        """The number of token ids; ids in prompts must be lower."""
        return self._vocab_size

    @property
    def recommended_sampling(self) -> Mapping[str, float]:
        """The fields of sampling parameters that the model's generation_config.json sets."""
        return self._requests.recommended

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer, which has `encode` and `decode`."""
        return self._tokenizer

    def stream(
        self, prompt: GivenPrompt | Conversation, sampling_params: SamplingParams
    ) -> Generator[str]:
        """Yield the text of one completion as it is generated; `sampling_params.n` must be 1."""
        yield from self._runner.stream(self._stream_collector(prompt, sampling_params))

    @with_vllm_arguments
    def embed(
        self,
        prompts: GivenPrompt | Sequence[GivenPrompt],
        *,
        pooling: Pooling | None = None,
        prompt_name: str | None = None,
        normalize: bool = True,
        truncate_prompt_tokens: int | None = None,
        truncation_side: Literal["left", "right"] = "right",
    ) -> list[list[float]]:
        """Return the embedding of each prompt, in the order of the prompts.

        Prompts are those of `generate`. `pooling` is `mean` of all tokens, the first token (`cls`)
        or the `last` one; None uses the default of the model. `prompt_name` names a prompt of the
        checkpoint, such as `query`, that is prepended to each text. `normalize` scales vectors to
        length 1. `truncate_prompt_tokens` keeps only this many tokens of each prompt, including the
        special tokens around a text, or with -1 as many as the model takes; `truncation_side` is
        where the others are removed. Raises InvalidRequestError for an invalid prompt or if the
        model generates text, and EngineError if the engine fails.
        """
        validator = self._validator
        if not isinstance(validator, EmbeddingValidator):
            raise InvalidRequestError('embed() requires task="embed".')
        check_bool("normalize", normalize)
        if prompt_name is not None:
            check_params(prompt_name, str, "prompt_name")
        if truncate_prompt_tokens is not None:
            check_int("truncate_prompt_tokens", truncate_prompt_tokens, -1, MAX_COUNT)
        if truncation_side not in ("left", "right"):
            raise invalid_field(
                "truncation_side", f"must be left or right, not {truncation_side!r:.80}."
            )
        texts = cast("list[str | tuple[int, ...]]", [one.value for one in read_prompts(prompts)])
        given = EmbeddingInput(
            prompts=tuple(texts),
            pooling=pooling,
            prompt_name=prompt_name,
            is_normalized=normalize,
            max_prompt_tokens=truncate_prompt_tokens,
            truncates_end=truncation_side == "right",
        )
        return embed_prompts(self._open_engine, validator, given)

    @with_vllm_arguments
    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
    ) -> list[float]:
        """Return the relevance of each document to its query; higher scores are more relevant.

        `queries` is one text for all documents, or a list with one entry per document.
        `instruction` describes the relevance to judge, for a reranker such as Qwen3-Reranker.
        Raises InvalidRequestError for an invalid text or if the model does not compute scores, and
        EngineError if the engine fails.
        """
        validator = self._validator
        if not isinstance(validator, ScoreValidator):
            raise InvalidRequestError(
                "The model is not a cross-encoder, and score() requires one, or a reranker with "
                'task="score".'
            )
        if instruction is not None:
            check_params(instruction, str, "instruction")
        given = ScoreInput(
            pairs=read_pairs(queries, documents),
            params=("queries", "documents"),
            instruction=instruction,
        )
        return score_pairs(self._open_engine, validator, given)

    def stats(self) -> EngineStats:
        """Return a snapshot of the engine's counters."""
        return self._engine.stats()

    def measure_rooflines(self) -> list[RankRoofline]:
        """Measure the speed of each rank's device, and return it with the work of its steps.

        The model must generate text, and no request may run at the same time. Raises WorkerError,
        and DeviceError if too little memory is free.
        """
        return self._open_engine.measure_rooflines()

    def close(self) -> None:
        """Stop the engine and its ranks. Further calls have no effect."""
        self._is_closed = True
        self._exit_close.cancel()
        self._engine.close(EngineError(_CLOSED))
        if isinstance(self._validator, Validator):
            self._validator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stream_collector(
        self, prompt: GivenPrompt | Conversation, params: SamplingParams
    ) -> Collector:
        check_params(params, SamplingParams, "sampling_params")
        if params.n != 1:
            raise invalid_field("n", f"must be 1 for streaming, not {params.n}.")
        given = self._requests.sample([read_stream_prompt(prompt)], params)
        (request,) = self._validated(given)
        return Collector(request, self._tokenizer, params=params)

    @property
    def _open_engine(self) -> EngineLoop:
        """The engine. Raises EngineError once it is closed."""
        self._check_open()
        return self._engine

    @property
    def _runner(self) -> RequestRunner:
        return RequestRunner(self._open_engine, self._sink)

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError(_CLOSED)

    def _run(
        self,
        prompts: Sequence[SaltedPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        show_progress: bool,
    ) -> list[Generation]:
        sampled = self._requests.sample(prompts, params)
        self._requests.text_validator()
        lengths = [min(one.params.max_tokens, self._max_model_len) for one in sampled]
        order = longest_first(lengths)
        results = self._runner.complete(
            self._parts([sampled[index] for index in order]),
            lengths=[lengths[index] for index in order],
            is_watched=any(one.params.stop for one in sampled),
            show_progress=show_progress,
        )
        placed = dict(zip(order, results, strict=True))
        return [placed[index] for index in range(len(order))]

    def _parts(self, prompts: Sequence[SampledPrompt]) -> Iterator[list[Collector]]:
        """Yield the collectors of the requests in parts. Raises InvalidRequestError.

        The engine runs the first part while the other parts are validated. The sizes of the parts
        grow up to a limit.
        """
        first, size = 0, _FIRST_PART
        while first < len(prompts):
            part = prompts[first : first + size]
            yield [
                Collector(
                    request,
                    self._tokenizer,
                    prompt=value if isinstance(value := one.prompt.value, str) else None,
                    params=one.params,
                )
                for request, one in zip(self._validated(part), part, strict=True)
            ]
            first, size = first + size, min(4 * size, _LARGEST_PART)

    def _validated(self, prompts: Sequence[SampledPrompt]) -> list[Request]:
        self._check_open()
        try:
            return run_apart(self._requests.make(prompts))
        except ShuttingDownError:
            # A structure was being compiled.
            self._check_open()
            raise
