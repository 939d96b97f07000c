"""The tokens with which a reranker answers whether a document meets a query."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.errors import CheckpointError

if TYPE_CHECKING:
    from pagedray.config import ModelConfig

__all__ = ["with_answers"]

_ANSWERS = ("no", "yes")


def with_answers(config: ModelConfig) -> ModelConfig:
    """Return the configuration with the ids of the answers, if they make the score.

    Raises CheckpointError if an answer is not one token of the tokenizer.
    """
    if config.score_head != "answer":
        return config
    # The library imports torch, which a process that only starts others never needs.
    import tokenizers

    path = config.folder / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    # The library raises no more specific error.
    except Exception as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise CheckpointError(f"{path} is not a valid tokenizer: {reason}.") from error
    no, yes = (tokenizer.token_to_id(answer) for answer in _ANSWERS)
    if no is None or yes is None or max(no, yes) >= config.vocab_size:
        raise CheckpointError(
            f"{path} must have the tokens {' and '.join(_ANSWERS)}: a decoder scores texts by the "
            "logits of these answers."
        )
    return replace(config, answer_token_ids=(no, yes))
