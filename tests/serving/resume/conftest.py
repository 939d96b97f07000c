"""A server whose streams can be resumed without API keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cluster.serving.intake import ReaderLimits
from tests.serving.conftest import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cluster.serving.text.tokenizer import Tokenizer

    Serving = Callable[..., Server]

GRACE_S = 3600.0
"""Does not end during a test, even if the machine pauses."""


@pytest.fixture(scope="session")
def serving(tokenizer: Tokenizer) -> Serving:
    """Makes servers with other limits, to be entered."""

    def serve(limits: ReaderLimits, *, key_file: Path | None = None) -> Server:
        return Server(tokenizer, context=2**20, reader_limits=limits, key_file=key_file)

    return serve


@pytest.fixture(scope="module")
def running_server(serving: Serving) -> Iterator[Server]:
    limits = ReaderLimits(resume_grace_s=GRACE_S, resumes_anonymous=True)
    with serving(limits) as server:
        yield server
