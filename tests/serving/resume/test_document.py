"""The programs in docs/streams.md read a whole stream although every connection is cut."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.serving.resume.cutting_proxy import cutting_proxy

if TYPE_CHECKING:
    from tests.serving.conftest import Server

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "streams.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
ADDRESSES = ("127.0.0.1:8000", "127.0.0.1:9000")


# Cut before the head or the first message has arrived, and within the text.
@pytest.mark.parametrize("num_bytes", [pytest.param(10, marks=pytest.mark.slow), 1500])
@pytest.mark.parametrize("place", [0, 1])
async def test_program_of_the_document_survives_cuts(
    server: Server, place: int, num_bytes: int
) -> None:
    frontends = server.frontends
    wanted = await asyncio.to_thread(
        httpx.post,
        f"{server.url}/v1/completions",
        json={"model": "tiny", "prompt": "def parse_date(text):", "max_tokens": 64},
    )
    server.engine.step_s = 0.003
    async with cutting_proxy((frontends.http_port, frontends.grpc_port)[place]) as proxy:
        program = PROGRAMS[place].replace(ADDRESSES[place], f"127.0.0.1:{proxy.port}")
        proxy.cut_next(num_bytes)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            program.replace("tiny-llama", "tiny"),
            stdout=asyncio.subprocess.PIPE,
        )
        printed, _ = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0
    assert proxy.has_cut
    assert printed.decode() == wanted.json()["choices"][0]["text"] + "\n"
