"""The chat templates of a checkpoint, by name, or their replacement."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.serving.text.templates.chat_template import ChatTemplate
from pagedray.errors import CheckpointError, InvalidRequestError, StartupError
from pagedray.files import has_file
from pagedray.text import quote

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ChatTemplates"]

_DEFAULT = "default"
_TOOL_USE = "tool_use"
_FILE = "chat_template.jinja"
_FOLDER = "additional_chat_templates"


class ChatTemplates:
    """A checkpoint's templates for conversations without and with tools."""

    def __init__(self, *, default: ChatTemplate | None, tool_use: ChatTemplate | None) -> None:
        """Without `tool_use`, `default` is used for both."""
        self._default = default
        self._tool_use = tool_use or default

    @classmethod
    def from_folder(
        cls, folder: Path, settings: Mapping[str, object], special_tokens: Mapping[str, str]
    ) -> ChatTemplates | None:
        """Return the templates of a folder, or None; settings belong to the tokenizer.

        Files override the settings, as in Transformers. Raises CheckpointError.
        """
        sources = _files(folder) or _configured(settings, folder / "tokenizer_config.json")
        default, tool_use = (
            ChatTemplate(sources[name][1], special_tokens, origin=str(sources[name][0]))
            if name in sources
            else None
            for name in (_DEFAULT, _TOOL_USE)
        )
        if default is None and tool_use is None:
            return None
        return cls(default=default, tool_use=tool_use)

    @classmethod
    def from_option(cls, given: str, special_tokens: Mapping[str, str]) -> ChatTemplates:
        """Return the templates of the option chat_template: a file, or a template in one line.

        As in vLLM, a value that is not a file is a template if it contains a brace or a line feed,
        and its backslash escapes are decoded. Raises StartupError.
        """
        origin, source = given, _option_source(given)
        if source is None:
            origin, source = "The option chat_template", _unescaped(given)
        return cls(default=ChatTemplate(source, special_tokens, origin=origin), tool_use=None)

    def template_for(self, tools: Sequence[Mapping[str, object]]) -> ChatTemplate:
        """Return the template of a conversation with these tools. Raises InvalidRequestError."""
        template = self._tool_use if tools else self._default
        if template is None:
            raise InvalidRequestError(
                "The model has no chat template for conversations without tools.",
                param="messages",
            )
        return template

    def variables(self, *, has_tools: bool) -> frozenset[str]:
        """Return the variables that a request may set in the template with or without tools."""
        template = self._tool_use if has_tools else self._default
        return frozenset() if template is None else template.variables

    def keeps_system_messages(self, *, has_tools: bool) -> bool:
        """Return whether later system messages are written at their places."""
        template = self._tool_use if has_tools else self._default
        return template is None or template.keeps_system_messages

    @property
    def dropped_roles(self) -> tuple[str, ...]:
        """The roles with messages that a template writes without their text."""
        templates = [one for one in (self._default, self._tool_use) if one is not None]
        return tuple(dict.fromkeys(role for one in templates for role in one.dropped_roles))

    @property
    def tool_source(self) -> str:
        """The source of the template for conversations with tools."""
        assert self._tool_use is not None
        return self._tool_use.source


def _files(folder: Path) -> dict[str, tuple[Path, str]]:
    """Return the path and source of each template that is a file of its own."""
    paths = {path.stem: path for path in sorted((folder / _FOLDER).glob("*.jinja"))}
    if has_file(folder / _FILE):
        paths[_DEFAULT] = folder / _FILE
    return {name: (path, _text(path)) for name, path in paths.items()}


def _configured(settings: Mapping[str, object], path: Path) -> dict[str, tuple[Path, str]]:
    """Return the path and source of each template in the settings."""
    given = settings.get("chat_template")
    if given is None:
        return {}
    if isinstance(given, str):
        return {_DEFAULT: (path, given)}
    if isinstance(given, list):
        entries = [entry if isinstance(entry, Mapping) else {} for entry in given]
        pairs = [(entry.get("name"), entry.get("template")) for entry in entries]
    else:
        pairs = list(given.items()) if isinstance(given, Mapping) else [(None, None)]
    sources: dict[str, tuple[Path, str]] = {}
    for name, source in pairs:
        if not isinstance(name, str) or not isinstance(source, str):
            raise CheckpointError(
                f"{path}: chat_template must be a string, or a list of objects with the strings "
                "name and template."
            )
        sources[name] = (path, source)
    return sources


def _option_source(given: str) -> str | None:
    """Return the text of the file that an option names; None if it is a template itself."""
    try:
        return Path(given).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise StartupError(f"chat_template {given} is not valid UTF-8.") from error
    except (OSError, ValueError) as error:
        if any(character in given for character in "{}\n"):
            return None
        reason = error.strerror if isinstance(error, OSError) else error
        raise StartupError(
            f"chat_template {quote(given)} is neither a template nor a readable file: {reason}."
        ) from error


def _unescaped(text: str) -> str:
    try:
        return text.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError as error:
        raise StartupError(
            f"chat_template {quote(text)} has an invalid escape: {error.reason}."
        ) from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not valid UTF-8.") from error
