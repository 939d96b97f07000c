"""Reads how a model with a classification head scores texts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig, ScoreActivation
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["SCORE_SUFFIX", "has_score_head", "with_score"]

SCORE_SUFFIX = "ForSequenceClassification"
_ACTIVATIONS: dict[str, ScoreActivation] = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.linear.Identity": "identity",
}


def has_score_head(file: ConfigFile) -> bool:
    """Return whether a checkpoint has a classification head."""
    return any(word.endswith(SCORE_SUFFIX) for word in file.words("architectures"))


def with_score(config: ModelConfig, file: ConfigFile) -> ModelConfig:
    """Return the configuration of a model with a head for one score. Raises CheckpointError."""
    labels = file.section("id2label")
    labels.note_read(*labels.given_keys())
    if len(labels.given_keys()) != 1:
        raise file.rejection("id2label", "must have one entry: the head must give one score")
    return replace(config, task="score", score_activation=_score_activation(file))


def _score_activation(file: ConfigFile) -> ScoreActivation:
    """Return the activation of a score in sentence-transformers, by its new or old key."""
    key, section = "activation_fn", file.section("sentence_transformers")
    if key not in section:
        key, section = "sbert_ce_default_activation_function", file
    return _ACTIVATIONS[section.choice(key, _ACTIVATIONS, next(iter(_ACTIVATIONS)))]
