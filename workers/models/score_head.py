"""The heads that give a pair of texts a score from one of its hidden states."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workers.layers.linear import ColumnParallelLinear, Columns
from workers.layers.weight import CompositeLayer, Placement

if TYPE_CHECKING:
    import torch

    from pagedray.model_config import ModelConfig

__all__ = ["ScoreHead"]


class ScoreHead(CompositeLayer):
    """A score head, which every rank holds and computes whole.

    RoBERTa and BERT have a dense layer, tanh and a layer with one output, under other names;
    decoders have only the last layer. A reranker that answers a question has no head of its own:
    its score is the probability of yes, if the answer is yes or no, by the rows of these tokens in
    the output head.
    """

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        place = replace(place, quantization=None)

        def linear(columns: list[Columns], *, has_bias: bool = True) -> ColumnParallelLinear:
            return ColumnParallelLinear(config.hidden_size, columns, place, has_bias=has_bias)

        dense_name, output_name = _names(config)
        self._dense = None
        if dense_name is not None:
            self._dense = linear([_columns(dense_name, config.hidden_size)])
        self._is_answer = config.score_head == "answer"
        if self._is_answer:
            answers = (slice(token_id, token_id + 1) for token_id in config.answer_token_ids)
            rows = [Columns(name=output_name, total=config.vocab_size, part=row) for row in answers]
            self._output = linear(rows, has_bias=False)
        else:
            self._output = linear([_columns(output_name, 1)], has_bias=dense_name is not None)
        self._has_sigmoid = config.score_activation == "sigmoid"

    def __call__(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return `[num_texts, 1]` float32 for `[num_texts, hidden_size]`."""
        if self._dense is not None:
            vectors = self._dense(vectors).tanh()
        scores = self._output(vectors).float()
        if self._is_answer:
            # The softmax of two logits is the sigmoid of their difference.
            scores = scores[:, 1:] - scores[:, :1]
        return scores.sigmoid() if self._has_sigmoid else scores


def _names(config: ModelConfig) -> tuple[str | None, str]:
    """Return the names of the dense layer, if any, and of the last layer."""
    match config.score_head:
        case "roberta":
            return "classifier.dense", "classifier.out_proj"
        case "bert":
            return f"{config.names.encoder}.pooler.dense", "classifier"
        case "linear":
            return None, "score"
        case "answer":
            return None, config.names.embedding if config.has_tied_embeddings else "lm_head"


def _columns(name: str, size: int) -> Columns:
    return Columns(name=name, total=size, part=slice(0, size))
