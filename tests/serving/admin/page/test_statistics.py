"""The statistics of the page, and what it shows of the server."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.serving.admin.page.chat_page import ChatPage
    from tests.serving.conftest import Server
    from tests.serving.fake_engine import FakeEngine

pytestmark = pytest.mark.slow


def test_idle_page_shows_the_model_and_what_it_runs_on(page: ChatPage) -> None:
    assert page.text("#idle-model") == "tiny"
    rows = dict(zip(page.texts("#idle-rows dt"), page.texts("#idle-rows dd"), strict=True))
    assert rows["Context length"] == "256 tokens"
    assert (rows["Device"], rows["KV cache"]) == ("CPU", "1,024 tokens")
    assert {"Data type", "Attention backend"} <= set(rows)
    links = page.evaluate("[...document.querySelectorAll('#idle-links a')].map((one) => one.href)")
    assert [link.rpartition("/")[2] for link in links] == [
        "docs",
        "openapi.json",
        "metrics",
        "models",
    ]


def test_load_is_live(page: ChatPage, engine: FakeEngine) -> None:
    # The fake engine has 60 of 64 device blocks free.
    assert page.text("#device-text") == "4 of 64"
    engine.step_s = 0.05
    page.say("hello")
    page.wait_for("document.getElementById('running').textContent === '1'")
    page.wait_for("document.querySelectorAll('#calls-body tr').length === 1")
    page.browser.press("Escape")
    page.wait_for("document.getElementById('running').textContent === '0'")


def test_charts_show_the_last_ten_minutes(
    page: ChatPage, server: Server, engine: FakeEngine
) -> None:
    recorder = server.frontends.servicer.observer.recorder
    stats = engine.stats()
    start_s = 1_000_000.0
    for number in range(121):
        recorder.first_token.record(0.25)
        counted = replace(stats, num_generated_tokens=1000 * number)
        recorder.add_sample(counted, start_s + 5 * number)
    page.load()
    page.wait_for("document.querySelector('.chart .value')?.textContent === '200'")
    assert page.texts(".chart h2") == ["Generated tokens/s", "First token", "KV cache in use"]
    first, blocks = page.texts(".chart .value")[1:]
    assert first.startswith("p50 2")
    assert blocks == "6.3%"
    line = page.evaluate("document.querySelector('.chart .series-0').getAttribute('d')")
    assert line.count("L") == 119
    assert line.startswith("M2.5 ")
    label = page.evaluate("document.querySelector('.chart svg').getAttribute('aria-label')")
    assert label == "Generated tokens/s over the last ten minutes; now 200"
    assert page.text("#latencies tr td").endswith("ms")


def test_pointer_shows_the_values_of_a_moment(page: ChatPage) -> None:
    page.evaluate(
        "import('/page/statistics/line_chart.js').then(({ LineChart }) => {"
        " const chart = new LineChart('Test', [''], String);"
        " document.getElementById('charts').prepend(chart.node);"
        " chart.draw([{age: 590, values: [7]}, {age: 10, values: [9]}]); window.isDone = true; })"
    )
    page.wait_for("window.isDone")
    assert page.text(".chart .value") == "9"
    box = page.evaluate(
        "(({x, y, width, height}) => ({x, y, width, height}))"
        "(document.querySelector('.chart svg').getBoundingClientRect())"
    )
    page.browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=box["x"] + 4, y=box["y"] + 9)
    page.wait_for("document.querySelector('.chart .value').textContent === '7 \u00b7 590 s ago'")
