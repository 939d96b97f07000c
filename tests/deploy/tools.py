"""Finds the programs that tests of deploy/ run, which `make deploy-tools` installs."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.deploy.kustomize import DEPLOY

__all__ = ["needs_tool", "tool"]

_INSTALLED = DEPLOY.parent / "build/tools/bin"


def tool(name: str) -> str:
    """Return the path of a program. Fails the test if it is not installed."""
    found = _find(name)
    assert found is not None, f"{name} is not installed; run make deploy-tools"
    return found


def needs_tool(name: str) -> pytest.MarkDecorator:
    """Skip a test without a program, except under CI, where all of them must be installed."""
    is_skipped = _find(name) is None and "CI" not in os.environ
    return pytest.mark.skipif(is_skipped, reason=f"needs {name}; run make deploy-tools")


def _find(name: str) -> str | None:
    return shutil.which(name, path=_INSTALLED) or shutil.which(name)
