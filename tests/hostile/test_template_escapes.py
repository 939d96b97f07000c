"""Chat templates that try to leave their sandbox: a model folder is not trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cluster.serving.text.chat_template import ChatTemplate
from cluster.serving.text.template_arguments import ChatMessage, ChatPrompt
from pagedray.errors import CheckpointError, InvalidRequestError

if TYPE_CHECKING:
    from pathlib import Path

# Expressions that would evaluate to Python's modules outside of a sandbox.
ROADS = (
    "messages.__class__.__mro__[1].__subclasses__()",
    "''.__class__.__base__.__subclasses__()",
    "messages['__class__']",
    "messages | attr('__class__')",
    "messages | map(attribute='__class__') | list",
    "[messages] | map('attr', '__class__') | list",
    "raise_exception.__globals__",
    "strftime_now.__globals__['__builtins__']",
    "namespace.__init__.__globals__",
    "cycler.__init__.__globals__",
    "joiner.__init__.__globals__",
    "lipsum.__globals__",
    "self.__init__.__globals__",
    "self._TemplateReference__context",
    "range.__self__",
    "dict.__subclasses__()",
    "'{0.__class__.__mro__}'.format(messages)",
    "'{0.__class__.__mro__}'.format_map({'0': messages})",
    "'%s' | format(messages.__class__)",
    "messages.append.__self__.__class__",
    "loop.__init__.__globals__",
)


def rendered(source: str) -> str:
    return ChatTemplate(source, {}, origin="here").render(ChatPrompt((ChatMessage("user", "x"),)))


@pytest.mark.parametrize("road", ROADS)
def test_no_road_leads_to_python(road: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    effect = f"['os'].system('touch {canary}')"
    with pytest.raises((CheckpointError, InvalidRequestError)):
        rendered(f"{{{{ ({road}){effect} }}}}")
    assert not canary.exists()
    try:
        text = rendered(f"{{{{ {road} }}}}")
    except (CheckpointError, InvalidRequestError):
        return
    # What is undefined is rendered as nothing; an object of Python would be `<...>`.
    assert "<" not in text


@pytest.mark.parametrize(
    "source",
    [
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as p %}",
        "{% from '/etc/passwd' import p %}",
        "{% extends '/etc/passwd' %}",
        "{% do messages.append(1) %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'y'}) }}",
        "{{ messages.clear() }}",
    ],
)
def test_templates_read_no_file_and_change_no_message(source: str) -> None:
    with pytest.raises((CheckpointError, InvalidRequestError)):
        rendered(source)


def test_texts_numbers_and_collections_are_written() -> None:
    source = (
        "{{ [1, 2.5, none, true, 'a', (1,), {'k': [undefined]}] }}{{ range(2) }}{{ undefined }}"
        "{{ messages[0].items() | list }}{{ messages | map(attribute='role') | list }}"
        "{{ {'a': 1}.keys() }}{{ namespace(a=1).a }}{{ ((-8) ** 0.5) is number }}"
    )
    expected = (
        "[1, 2.5, None, True, 'a', (1,), {'k': [Undefined]}]range(0, 2)"
        "[('role', 'user'), ('content', 'x')]['user']dict_keys(['a'])1True"
    )
    assert rendered(source) == expected
