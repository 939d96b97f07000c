"""A servicer over a fake engine, for the tests of logs and metrics."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from cluster.serving.engine_client import EngineClient
from cluster.serving.servicer import Servicer
from tests.serving.conftest import engine_config
from tests.serving.fake_engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cluster.serving.text.tokenizer import Tokenizer


@pytest.fixture
async def servicer(tokenizer: Tokenizer) -> AsyncIterator[Servicer]:
    client = EngineClient(asyncio.get_running_loop())
    engine = FakeEngine(client, lambda request, index: [72, 73])
    client.attach_engine(engine)
    servicer = Servicer(client, tokenizer, engine_config())
    servicer.set_ready()
    yield servicer
    await servicer.close()
    engine.stop()
