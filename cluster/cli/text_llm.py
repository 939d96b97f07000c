"""The `LLM` of commands that generate text."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cluster.llm.llm import LLM
from pagedray.errors import StartupError
from pagedray.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from cluster.engine.engine_options import EngineOptions
    from cluster.engine.executor import ReportProgress
    from cluster.llm.generation import Collector
    from pagedray.config import EngineConfig

__all__ = ["LocalModel", "TextLLM"]


class TextLLM(LLM):
    """An `LLM` with a model that generates text, which is checked before the model is loaded."""

    def _open(self, config: EngineConfig, report_progress: ReportProgress) -> None:
        task = config.model.task
        if task != "generate":
            raise StartupError(
                f"The task of {config.model.name} is {task}, but this command generates text; use "
                f"`pagedray serve`, or the method {task} of the class LLM."
            )
        super()._open(config, report_progress)

    def collect_stream(
        self, prompt: str | Sequence[Mapping[str, str]], params: SamplingParams
    ) -> tuple[Collector, Generator[str, None, None]]:
        """Return the collector of a request, and the pieces of its text."""
        collector = self._stream_collector(prompt, params)
        return collector, self._runner.stream(collector)


class LocalModel:
    """A model in this process, for `pagedray generate` and `pagedray chat`."""

    # Any: fields of sampling parameters, of all types.
    def __init__(self, model: str, options: EngineOptions, given: Mapping[str, Any]) -> None:
        """Load a model; `given` are the sampling parameters that the user sets."""
        self._llm = TextLLM(model, **asdict(options))
        # Parameters of the user, of the model's file, or greedy parameters, in this order.
        recommended = self._llm.recommended_sampling
        self._sampling = SamplingParams(**{"temperature": 0.0, **recommended, **given})
        self.num_tokens = 0
        """Number of tokens that the last stream has generated."""
        self.is_cut = False
        """Whether `max_tokens` ended the last stream."""

    @property
    def has_chat_template(self) -> bool:
        """Whether the model can chat."""
        return self._llm.get_tokenizer().has_chat_template

    def stream(
        self, prompt: str | Sequence[Mapping[str, str]]
    ) -> Generator[tuple[str, bool], None, None]:
        """Yield the parts of a completion or an answer; none is marked as reasoning."""
        self.num_tokens, self.is_cut = 0, False
        collector, pieces = self._llm.collect_stream(prompt, self._sampling)
        try:
            for piece in pieces:
                yield piece, False
        finally:
            pieces.close()
            (completion,) = collector.generation().outputs
            self.num_tokens = len(completion.token_ids)
            self.is_cut = completion.finish_reason == "length"

    def complete(self, text: str) -> dict[str, Any]:  # Any: JSON values
        """Return the completion of a text as the object that `--json` prints, without times."""
        (generation,) = self._llm.generate(text, self._sampling, use_tqdm=False)
        (completion,) = generation.outputs
        return {
            "prompt": text,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "num_prompt_tokens": len(generation.prompt_token_ids),
            "num_generated_tokens": len(completion.token_ids),
        }

    def close(self) -> None:
        """Unload the model."""
        self._llm.close()
