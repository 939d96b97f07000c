"""Parses MODEL: a folder, or the name of a model on the Hub. Sends no request to a server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pagedray.errors import CheckpointError

__all__ = ["HubName", "HubSettings", "is_commit", "is_gguf", "is_side_file", "parse_model"]

_PART = r"\w(?:[\w.-]{0,94}\w)?"
_ID = re.compile(rf"{_PART}/{_PART}", re.ASCII)
_REVISION = re.compile(r"\w[\w./+-]{0,199}", re.ASCII)
_QUANT = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NOT_IN_IDS = ("--", "..")
_FOLDER_STARTS = ("/", "./", "../", "~")
_EXAMPLE = "Qwen/Qwen3-0.6B"
_NAMES = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "config_sentence_transformers.json",
        "generation_config.json",
        "merges.txt",
        "model.safetensors.index.json",
        "modules.json",
        "sentence_bert_config.json",
        "special_tokens_map.json",
        "tekken.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)
# More templates, and the modules of sentence-transformers, such as 1_Pooling.
_PATTERN = re.compile(
    r"additional_chat_templates/[^/]+\.jinja|\d+_\w+/config\.json|\d+_Dense/model\.safetensors",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the Hub, and its branch, tag or commit."""

    id: str
    revision: str
    quant: str | None = None
    """Which of the repository's GGUF files is meant: a part of its name, such as Q4_K_M."""

    def __str__(self) -> str:
        name = self.id if self.quant is None else f"{self.id}:{self.quant}"
        if self.revision == "main":
            return name
        return f"{name}@{self.revision[:12] if is_commit(self.revision) else self.revision}"


def parse_model(model: str | Path) -> Path | HubName:
    """Return the folder or GGUF file that `model` names, or else the Hub id.

    A folder that exists wins. A Path never is a Hub id. Raises CheckpointError.
    """
    path = Path(model)
    if isinstance(model, Path) or (model and (_is_folder(path) or is_gguf(model))):
        return path
    if model and _is_there(path):
        raise CheckpointError(f"{_shown(model)} is a file; {_what_a_model_is()}")
    name, at, revision = model.partition("@")
    model_id, colon, quant = name.partition(":")
    if model.startswith(_FOLDER_STARTS) or model_id.count("/") != 1:
        raise CheckpointError(f"{_shown(model)} is not a folder; {_what_a_model_is()}")
    if not _ID.fullmatch(model_id) or any(text in model_id for text in _NOT_IN_IDS):
        raise CheckpointError(
            f"{_shown(model)} is neither a folder nor a valid Hub id; an id is ORG/NAME, each of "
            "up to 96 letters, digits, '_', '-' and '.', without '--' and '..'."
        )
    if at and not _is_revision(revision):
        raise CheckpointError(
            f"{_shown(model)} names an invalid revision; after the @, write a branch, a tag or a "
            "commit."
        )
    if colon and not _QUANT.fullmatch(quant):
        raise CheckpointError(
            f"{_shown(model)} names no GGUF file; after the colon, write a part of the name of the "
            "file, such as Q4_K_M."
        )
    return HubName(model_id, revision or "main", quant or None)


def is_gguf(model: str | Path) -> bool:
    """Return whether a name is that of a GGUF file."""
    return str(model).endswith(".gguf")


def is_commit(revision: str) -> bool:
    """Return whether a revision is a commit, which never changes."""
    return _COMMIT.fullmatch(revision) is not None


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        # Such as a name that is too long.
        return False


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _is_revision(text: str) -> bool:
    return (
        _REVISION.fullmatch(text) is not None
        and not any(part in text for part in ("..", "//"))
        and not text.endswith(("/", ".", ".lock"))
    )


def _what_a_model_is() -> str:
    return (
        f"a model is a folder with config.json and weights, a GGUF file, or a Hub id such as "
        f"{_EXAMPLE} or {_EXAMPLE}@main."
    )


def _shown(model: str) -> str:
    is_plain = model.isprintable() and not set(model) & set(" '\"\\") and 0 < len(model) <= 200
    return model if is_plain else f"{model!r:.200}"


def is_side_file(name: str) -> bool:
    """Return whether a file configures the model, its tokenizer or its chat template."""
    return name in _NAMES or _PATTERN.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSettings:
    """The Hub, the cache of this node, and how long the Hub may be silent."""

    endpoint: str
    cache: Path
    is_offline: bool = False
    """Whether only the cache may be used."""
    answer_timeout_s: float = 30.0
    """How long the Hub may send nothing while it describes a model."""
    retry_s: float = 1.0
    """Pause before the first retry of a request that the Hub could not answer."""
    silence_s: float = 330.0
    """How long a download may receive nothing; the Hub's limits on requests last five minutes."""

    @classmethod
    def from_environment(cls, cache: Path | None = None) -> HubSettings:
        """Return the settings that huggingface_hub reads, such as HF_ENDPOINT and HF_HUB_OFFLINE.

        `cache` replaces the cache folder of the environment.
        """
        # Imported only if a model is on the Hub: it takes half a second.
        from huggingface_hub import constants

        return cls(
            endpoint=constants.ENDPOINT,
            cache=cache or Path(constants.HF_HUB_CACHE),
            is_offline=constants.HF_HUB_OFFLINE,
        )
