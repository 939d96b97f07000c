"""Reads how a model with a classification head scores texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pagedray.errors import CheckpointError
from pagedray.files import has_file
from workers.models.config_json.config_file import ConfigFile

if TYPE_CHECKING:
    import tokenizers

    from pagedray.model_config import ModelConfig, ScoreActivation

__all__ = [
    "SCORE_SUFFIX",
    "has_score_head",
    "is_reranker",
    "load_tokenizer",
    "with_answers",
    "with_score",
]

SCORE_SUFFIX = "ForSequenceClassification"
_ACTIVATIONS: dict[str, ScoreActivation] = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.linear.Identity": "identity",
}

_ANSWERS = ("no", "yes")
_MODULE = "LogitScore"


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


def is_reranker(folder: Path) -> bool:
    """Return whether sentence-transformers scores texts by the answer of this decoder."""
    return _score_module(folder) is not None


def with_answers(config: ModelConfig) -> ModelConfig:
    """Return the configuration; a model that scores by answers gets the ids of `no` and `yes`.

    Raises CheckpointError if an answer is not one token of the tokenizer.
    """
    if config.score_head != "answer":
        return config
    path = config.folder / "tokenizer.json"
    tokenizer = load_tokenizer(path)
    no, yes = (tokenizer.token_to_id(answer) for answer in _ANSWERS)
    if no is None or yes is None or max(no, yes) >= config.vocab_size:
        raise CheckpointError(
            f"{path} must have the tokens {' and '.join(_ANSWERS)}: a decoder scores texts by the "
            "logits of these answers."
        )
    _check_module(config.folder, no=no, yes=yes)
    return replace(config, answer_token_ids=(no, yes))


def load_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Return the library's tokenizer of a file. Raises CheckpointError."""
    # The library imports torch, which a process that only starts others never needs.
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(path))
    # The library raises no more specific error.
    except Exception as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise CheckpointError(f"{path} is not a valid tokenizer: {reason}.") from error


def _check_module(folder: Path, *, no: int, yes: int) -> None:
    """Raise CheckpointError if sentence-transformers scores by other answers."""
    module = _score_module(folder)
    if module is None:
        return
    # The name of a folder next to it, never another path.
    path = folder / Path(str(module.value("path"))).name / "config.json"
    file = ConfigFile.read(path)
    for key, token_id in (("true_token_id", yes), ("false_token_id", no)):
        if file.value(key) != token_id:
            raise file.rejection(
                key,
                f"must be {token_id}, the token of the answer in the prompt of Qwen3-Reranker; "
                "rerankers with other answers are not supported",
            )


def _score_module(folder: Path) -> ConfigFile | None:
    path = folder / "modules.json"
    if not has_file(path):
        return None
    modules = ConfigFile.read_list(path)
    return next((one for one in modules if str(one.value("type")).endswith(f".{_MODULE}")), None)
