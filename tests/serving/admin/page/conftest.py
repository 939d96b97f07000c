"""The page at `/` in a headless Chromium, over the frontends of a fake engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cluster.serving.intake import ReaderLimits
from tests.serving.admin.page.chat_page import ChatPage
from tests.serving.admin.page.chromium import CHROMIUM, Browser
from tests.serving.conftest import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.serving.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed; make test-page installs it.")
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="session")
def running_server(tokenizer: Tokenizer) -> Iterator[Server]:
    """A server that resumes streams, as those of `pagedray serve` do."""
    with Server(tokenizer, reader_limits=ReaderLimits(resume_grace_s=3600.0)) as server:
        yield server


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[ChatPage]:
    """The page, ready, in a desktop's window, with nothing in the browser's storage."""
    with ChatPage(browser, server) as page:
        yield page
