"""The prompts of a sentence-transformers checkpoint, which are written before texts.

`config_sentence_transformers.json` names them, and the default.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedray.errors import InvalidRequestError
from pagedray.files import has_file
from pagedray.text import quote
from workers.models.config_json.config_file import ConfigFile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["SentencePrompts"]


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
            raise InvalidRequestError(
                f"prompt_name must be the name of a prompt of the model, which has {known}, not "
                f"{quote(name)}.",
                param="prompt_name",
            )
        return self._prompts[name]
