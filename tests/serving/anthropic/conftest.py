"""A server of a model that calls tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.serving.anthropic.message_calls import TEMPLATE
from tests.serving.conftest import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster.serving.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tool_server(template_tokenizer: Callable[..., Tokenizer]) -> Iterator[Server]:
    """A server of a model that calls tools, whose template writes all that it gets."""
    with Server(template_tokenizer(TEMPLATE), context=1024) as server:
        yield server
