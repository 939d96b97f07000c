"""A server of a model that calls tools, and a client of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import openai
import pytest

from cluster.serving.responses.stored_responses import StoreLimits
from tests.serving.conftest import Server
from tests.serving.responses.response_calls import TEMPLATE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster.serving.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tool_server(template_tokenizer: Callable[..., Tokenizer]) -> Iterator[Server]:
    """A server of a model that calls tools, whose template writes all that it gets."""
    with Server(template_tokenizer(TEMPLATE), context=1024, store_limits=StoreLimits()) as server:
        yield server


@pytest.fixture
def client(tool_server: Server) -> Iterator[openai.OpenAI]:
    tool_server.engine.reset()
    with openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="x", max_retries=0) as client:
        yield client
