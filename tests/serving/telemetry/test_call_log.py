"""The log: one line for each call, in both formats, whatever a client sends."""

from __future__ import annotations

import io
import json
import logging
import threading
from typing import TYPE_CHECKING

import pytest

from cluster.serving.inputs import CallOrigin, GenerationInput
from cluster.serving.telemetry.log_lines import logging_to
from pagedray.errors import InvalidRequestError

if TYPE_CHECKING:
    from cluster.serving.servicer import Servicer
    from cluster.serving.telemetry.log_lines import LogFormat

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
NASTY = 'a\nlevel=ERROR fake\r\x1b[2J\u2028"\x00'


async def logged(servicer: Servicer, form: LogFormat, **given: object) -> list[str]:
    stream = io.StringIO()
    with logging_to(stream, form=form):
        fields: dict[str, object] = {
            "prompts": ("my secret words",),
            "sampling": {"max_tokens": 3},
            "client_id": "call-1",
        }
        generation = await servicer.start_generation(GenerationInput(**fields | given))  # type: ignore[arg-type]  # the test's
        async for _ in generation.outputs():
            pass
        generation.close()
    # A server of another test may log something meanwhile.
    return [line for line in stream.getvalue().splitlines() if "call-1" in line]


async def test_json_line_describes_the_call(servicer: Servicer) -> None:
    origin = CallOrigin(frontend="grpc", traceparent=f"00-{TRACE_ID}-00f067aa0ba902b7-01")
    (line,) = await logged(servicer, "json", origin=origin)
    found = json.loads(line)
    expected = {
        "level": "info",
        "id": "call-1",
        "frontend": "grpc",
        "operation": "text_completion",
        "outcome": "length",
        "generated_tokens": 3,
        "trace_id": TRACE_ID,
    }
    assert expected.items() <= found.items()
    assert 0 <= found["validated_s"] <= found["first_token_s"] <= found["duration_s"]
    assert "secret" not in line


async def test_line_of_a_rejected_id_is_no_longer_than_others(servicer: Servicer) -> None:
    stream = io.StringIO()
    given = GenerationInput(prompts=("x",), client_id="\x85" * 2**20)
    with logging_to(stream, form="text"), pytest.raises(InvalidRequestError):
        await servicer.start_generation(given)
    assert "id=" in stream.getvalue()
    assert len(stream.getvalue()) < 2**11


async def test_text_line_says_the_same(servicer: Servicer) -> None:
    (line,) = await logged(servicer, "text")
    assert " INFO call id=call-1 " in line
    assert " outcome=length " in line
    assert "secret" not in line


def _log(form: LogFormat, message: str, **fields: object) -> str:
    stream = io.StringIO()
    with logging_to(stream, form=form):
        logging.getLogger("cluster.test").info(message, extra={"fields": fields})
    return stream.getvalue()


@pytest.mark.parametrize("form", ["text", "json"])
def test_line_is_one_line_whatever_is_in_it(form: LogFormat) -> None:
    for text in (_log(form, "call", id=NASTY), _log(form, NASTY)):
        assert text.endswith("\n")
        assert text[:-1].isprintable()
    assert json.loads(_log("json", "call", id=NASTY))["id"] == NASTY


def test_level_filters_lines() -> None:
    stream = io.StringIO()
    with logging_to(stream, level="warning"):
        logging.getLogger("cluster.test").info("quiet")
        logging.getLogger("cluster.test").warning("loud")
    assert "quiet" not in stream.getvalue()
    assert "WARNING loud" in stream.getvalue()


def test_lines_of_a_rank_in_this_process_are_written() -> None:
    stream = io.StringIO()
    with logging_to(stream):
        for name in ("attention.a", "pagedray.b", "workers.c", "another_library"):
            logging.getLogger(name).info("from %s", name)
    lines = stream.getvalue().splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == ["attention.a", "pagedray.b", "workers.c"]


class _StuckStream(io.StringIO):
    """A pipe that is not read for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.is_free = threading.Event()

    def write(self, text: str) -> int:
        self.is_free.wait()
        return super().write(text)


def test_unread_stream_blocks_no_caller() -> None:
    stream = _StuckStream()
    logger = logging.getLogger("cluster.test")
    with logging_to(stream):
        for number in range(10_100):
            logger.info("line %d", number)
        stream.is_free.set()
        while stream.getvalue().count("\n") < 10_000:
            stream.is_free.wait()
        logger.info("after")
    text = stream.getvalue()
    assert "line 0\n" in text
    assert "line 10099" not in text
    num_lost = 10_100 - text.count("line ")
    assert f"after (dropped {num_lost} lines before this one)" in text
