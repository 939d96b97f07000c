"""docs/ray-serve.md lists every argument of the Ray Serve application, with its default."""

from __future__ import annotations

import json
import re
from dataclasses import fields

import pytest

from cluster.serving.ray_serve.options import ServeOptions
from tests.system.server_process import ROOT

_ROWS = re.findall(
    r"^\| (`\w.*?) \| .* \| (.*) \|$", (ROOT / "docs" / "ray-serve.md").read_text(), re.MULTILINE
)
_DEFAULTS = {
    name: written
    for names, defaults in _ROWS
    for name, written in zip(re.findall(r"`(\w+)`", names), defaults.split(", "), strict=False)
}


@pytest.mark.parametrize("name", [field.name for field in fields(ServeOptions)])
def test_the_document_has_the_default_of_an_argument(name: str) -> None:
    default, written = getattr(ServeOptions(), name), _DEFAULTS[name].strip("`")
    if default is None:
        # What happens without it is said in words.
        assert not re.fullmatch(r"[\d.]+|true|false", written)
    elif isinstance(default, str):
        assert written == default
    else:
        assert json.loads(written) == default
