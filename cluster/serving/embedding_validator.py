"""The validator of embedding calls: it turns a client's input into a request or rejects it."""

from __future__ import annotations

import asyncio
import json
from itertools import chain
from typing import TYPE_CHECKING, Any, get_args

from cluster.engine.embedding_scheduler import EmbeddingRequest
from cluster.serving.inputs import check_model_name
from cluster.serving.prompt_reader import (
    DEFAULT_INSTRUCTION,
    PromptReader,
    are_long,
    check_truncation,
    truncated,
    warn_of_unknown_tokens,
)
from pagedray.batch import Pooling
from pagedray.errors import CheckpointError, InvalidRequestError, invalid_field
from pagedray.files import has_file
from pagedray.text import pluralize, quote
from workers.models.config_json.config_file import ConfigFile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from cluster.serving.inputs import EmbeddingInput, ScoreInput
    from cluster.serving.text.text_pool import TextPool
    from cluster.serving.text.tokenizer import Tokenizer
    from pagedray.config import EngineConfig

__all__ = [
    "MAX_PAIRS",
    "MAX_PROMPTS",
    "EmbeddingValidator",
    "ScoreValidator",
    "SentencePrompts",
    "longest_text",
]

MAX_PROMPTS = 2048
"""Maximum number of texts in a call."""
_POOLING_OF = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_MAX_TOKENS = 2**26

MAX_PAIRS = 2048
"""Maximum number of pairs in a call."""
_MAX_INSTRUCTION = 4096


class EmbeddingValidator:
    """Checks input against the limits of one model and tokenizes it."""

    def __init__(
        self, config: EngineConfig, tokenizer: Tokenizer, *, text_pool: TextPool | None = None
    ) -> None:
        """Raises CheckpointError if the checkpoint's pooling is not supported."""
        if config.model.task == "embed":
            warn_of_unknown_tokens(config, tokenizer)
        self._tokenizer = tokenizer
        self._reader = PromptReader(config, tokenizer, text_pool=text_pool)
        self._model = config.model
        self._context = config.max_model_len
        self._prompts = SentencePrompts({})
        if config.model.task == "embed":
            self._prompts = SentencePrompts.from_folder(config.model.folder)
            self._context = longest_text(config.model.folder, config.max_model_len)
        self._size = config.model.vector_size
        # Only the last token of a causal decoder attends to all others.
        attends_to_all = config.model.is_encoder or config.model.is_bidirectional
        default: Pooling = "mean" if attends_to_all else "last"
        self._pooling = _read_pooling(config.model.folder, default)

    async def validate(self, given: EmbeddingInput) -> EmbeddingRequest:
        """Return the request. Raises RequestError."""
        check_model_name(given.model, self._model)
        if given.pooling is not None and given.pooling not in get_args(Pooling):
            raise invalid_field(
                "pooling",
                f"must be one of {', '.join(get_args(Pooling))}, not {given.pooling!r:.60}.",
            )
        size = given.dimensions
        if size is not None and not 1 <= size <= self._size:
            raise invalid_field("dimensions", f"must be from 1 to {self._size}, not {size!s:.40}.")
        if not 1 <= len(given.prompts) <= MAX_PROMPTS:
            raise invalid_field(
                given.param, f"must have 1 to {MAX_PROMPTS} texts, not {len(given.prompts)}."
            )
        if "" in given.prompts:
            raise invalid_field(given.param, "must not have an empty text.")
        check_truncation(given.max_prompt_tokens)
        before = self._prompts.prompt(given.prompt_name)
        is_long = are_long(given.prompts)
        texts: list[tuple[int, ...]] = []
        for prompt in given.prompts:
            text = _with_prompt(before, prompt, given.prompt_name)
            texts.append(await self._read(text, given, is_long=is_long))
            # Let other calls run between the texts of a long list.
            await asyncio.sleep(0)
        return EmbeddingRequest(
            texts=tuple(texts),
            pooling=given.pooling or self._pooling,
            is_normalized=given.is_normalized,
            size=self._size if size is None else size,
            tenant=given.tenant,
            deadline_s=given.deadline_s,
        )

    async def _read(
        self, prompt: str | tuple[int, ...], given: EmbeddingInput, *, is_long: bool
    ) -> tuple[int, ...]:
        num_kept = self._context if given.max_prompt_tokens == -1 else given.max_prompt_tokens
        num_special = (0, 0)
        if not isinstance(prompt, str):
            # The reader does not check the ids of a text that exceeds the context.
            prompt = truncated(prompt, num_kept, truncates_end=given.truncates_end)
        elif num_kept is not None:
            num_special = self._special_tokens_within(num_kept)
        token_ids = await self._reader.read_prompt(
            prompt,
            is_long=is_long,
            tenant=given.tenant,
            param=given.param,
            is_truncated=num_kept is not None,
        )
        token_ids = truncated(
            token_ids, num_kept, truncates_end=given.truncates_end, num_special=num_special
        )
        if not 1 <= len(token_ids) <= self._context:
            raise invalid_field(
                given.param, f"must have 1 to {self._context} tokens, not {len(token_ids)}."
            )
        return token_ids

    def _special_tokens_within(self, num_kept: int) -> tuple[int, int]:
        """Return the number of special tokens before and after a text.

        Raises InvalidRequestError if there is no room for a token between them.
        """
        num_special = self._tokenizer.num_special_tokens
        if num_kept <= sum(num_special):
            raise invalid_field(
                "truncate_prompt_tokens",
                f"must be -1, or {sum(num_special) + 1} or more for texts, which have "
                f"{pluralize(sum(num_special), 'special token')}, not {num_kept}.",
            )
        return num_special


def _with_prompt(
    before: str, prompt: str | tuple[int, ...], name: str | None
) -> str | tuple[int, ...]:
    """Return a text after a prompt; a prompt cannot be named for token ids, which are complete."""
    if isinstance(prompt, str):
        return before + prompt
    if name is not None:
        raise invalid_field("prompt_name", "cannot be used with token ids; send texts.")
    return prompt


def _read_pooling(folder: Path, default: Pooling) -> Pooling:
    """Return the pooling of a sentence-transformers checkpoint; `default` if it has no setting."""
    path = folder / "1_Pooling" / "config.json"
    if not has_file(path):
        return default
    try:
        # Any: JSON written by another program.
        settings: Any = json.loads(path.read_text(encoding="utf-8"))
        if settings.get("include_prompt", True) is not True:
            raise CheckpointError(f"{path}: include_prompt must be true.")
        chosen = [
            key for key, value in settings.items() if key.startswith("pooling_mode_") and value
        ]
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a JSON object.") from error
    for pooling in get_args(Pooling):
        if [_POOLING_OF.get(key) for key in chosen] == [pooling]:
            return pooling  # type: ignore[no-any-return]  # get_args returns Any
    raise CheckpointError(
        f"{path} enables {', '.join(chosen) or 'no pooling'}; supported is exactly one of "
        f"{', '.join(_POOLING_OF)}."
    )


def longest_text(folder: Path, context: int) -> int:
    """Return the maximum number of tokens of a text. Raises CheckpointError."""
    path = folder / "sentence_bert_config.json"
    if not has_file(path):
        return context
    file = ConfigFile.read(path)
    file.reject_unless("do_lower_case", False)
    return min(context, file.integer("max_seq_length", context, most=_MAX_TOKENS))


class SentencePrompts:
    """Prompts by name, and the default prompt."""

    def __init__(self, prompts: Mapping[str, str], default: str = "") -> None:
        self._prompts = prompts
        self._default = default

    @classmethod
    def from_folder(cls, folder: Path) -> SentencePrompts:
        """Return the prompts of a checkpoint, if any. Raises CheckpointError."""
        path = folder / "config_sentence_transformers.json"
        if not has_file(path):
            return cls({})
        file = ConfigFile.read(path)
        section = file.section("prompts")
        prompts: dict[str, str] = {}
        for name in section.given_keys():
            prompt = section.value(name)
            if not isinstance(prompt, str):
                raise section.rejection(name, "must be a text")
            prompts[name] = prompt
        default = file.value("default_prompt_name")
        if default is None:
            return cls(prompts)
        if not isinstance(default, str) or default not in prompts:
            raise file.rejection("default_prompt_name", "must be the name of one of its prompts")
        return cls(prompts, prompts[default])

    def prompt(self, name: str | None) -> str:
        """Return the prompt of a name, or the default prompt.

        Raises InvalidRequestError.
        """
        if name is None:
            return self._default
        if name not in self._prompts:
            known = ", ".join(self._prompts) or "none"
            raise invalid_field(
                "prompt_name",
                f"must be the name of a prompt of the model, which has {known}, not {quote(name)}.",
            )
        return self._prompts[name]


class ScoreValidator:
    """Checks pairs of texts against the limits of one model that scores, and tokenizes them."""

    def __init__(
        self, config: EngineConfig, tokenizer: Tokenizer, *, text_pool: TextPool | None = None
    ) -> None:
        if config.model.task == "score":
            warn_of_unknown_tokens(config, tokenizer)
        self._reader = PromptReader(config, tokenizer, text_pool=text_pool)
        self._model = config.model
        self._context = config.max_model_len
        self._is_decoder = not config.model.is_encoder
        self._answers = config.model.score_head == "answer"
        self._num_types = config.model.num_token_types

    async def validate(self, given: ScoreInput) -> EmbeddingRequest:
        """Return the request; its vectors are the scores. Raises RequestError."""
        check_model_name(given.model, self._model)
        _, name = given.params
        if not 1 <= len(given.pairs) <= MAX_PAIRS:
            raise invalid_field(name, f"must have 1 to {MAX_PAIRS} texts, not {len(given.pairs)}.")
        for side, param in zip(zip(*given.pairs, strict=True), given.params, strict=True):
            if not all(side):
                raise invalid_field(param, "must not have an empty text.")
        instruction = self._instruction(given)
        is_long = are_long(chain.from_iterable(given.pairs))
        texts: list[tuple[int, ...]] = []
        num_first_type: list[int] = []
        for pair in given.pairs:
            if self._answers:
                token_ids = await self._reader.read_question(
                    pair, instruction, is_long=is_long, tenant=given.tenant, params=given.params
                )
            else:
                token_ids, num_first = await self._reader.read_pair(
                    pair, is_long=is_long, tenant=given.tenant, params=given.params
                )
                num_first_type.append(num_first)
            if len(token_ids) > self._context:
                raise InvalidRequestError(
                    f"{given.params[0]} and an entry of {name} may have at most {self._context} "
                    f"tokens together, not {len(token_ids)}.",
                    param=name,
                )
            texts.append(token_ids)
            # Let other calls run between the texts of a long list.
            await asyncio.sleep(0)
        return EmbeddingRequest(
            texts=tuple(texts),
            # Only the last token of a decoder attends to all others.
            pooling="last" if self._is_decoder else "cls",
            is_normalized=False,
            size=1,
            # A RoBERTa has one type only, and decoders have none.
            num_first_type=tuple(num_first_type) if self._num_types > 1 else (),
            tenant=given.tenant,
            deadline_s=given.deadline_s,
        )

    def _instruction(self, given: ScoreInput) -> str:
        if given.instruction is None:
            return DEFAULT_INSTRUCTION
        if not self._answers:
            raise invalid_field(
                "instruction",
                "requires a reranker whose prompt contains it, such as Qwen3-Reranker; "
                f"{self._model.name} scores texts without an instruction.",
            )
        if not 1 <= len(given.instruction) <= _MAX_INSTRUCTION:
            raise invalid_field(
                "instruction",
                f"must have 1 to {_MAX_INSTRUCTION} characters, not {len(given.instruction)}.",
            )
        return given.instruction
