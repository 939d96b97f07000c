"""A server whose model has tools, and a client of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import openai
import pytest

from tests.serving.conftest import Server
from tests.serving.openai.tools.chats import TEMPLATE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster.serving.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tool_server(template_tokenizer: Callable[..., Tokenizer]) -> Iterator[Server]:
    with Server(template_tokenizer(TEMPLATE), context=2048) as server:
        yield server


@pytest.fixture
def client(tool_server: Server) -> Iterator[openai.OpenAI]:
    tool_server.engine.reset()
    with openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
