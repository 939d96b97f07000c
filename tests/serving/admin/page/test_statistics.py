"""The statistics of the page, and what it shows of the server."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import httpx

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


@pytest.mark.parametrize("width", [360, 800, 1000, 1280, 1920])
@pytest.mark.parametrize(
    "info",
    [
        {"model": "tiny-llama", "architecture": "LlamaForCausalLM", "quantization": ""},
        {"model": "Qwen3-235B-A22B-Instruct-2507-FP8", "architecture": "Qwen3MoeForCausalLM"},
        {"model": "x" * 34, "architecture": "Glm4MoeForCausalLM", "num_blocks": 123_456_789},
    ],
)
def test_values_of_the_card_do_not_break(
    page: ChatPage, http: httpx.Client, info: dict[str, object], width: int
) -> None:
    large = {"dtype": "bfloat16", "quantization": "compressed-tensors", "max_num_seqs": 1024}
    given = json.dumps(http.get("/server_info").json() | large | info)
    page.browser.look(width=width, height=800)
    page.evaluate(
        f"import('/page/idle_card.js').then((card) => card.showIdleCard({given}, {{}}))"
        ".then(() => document.fonts.ready)"
    )
    # Of each text, the number of its lines, and whether all of it is shown.
    shown = page.evaluate(
        "[...document.querySelectorAll('#idle-model, #idle-rows :is(dt, dd)')].map((one) => {"
        " const range = document.createRange(); range.selectNodeContents(one);"
        " return [one.textContent, range.getClientRects().length,"
        " one.scrollWidth <= one.clientWidth]; })"
    )
    assert len(shown) == 19
    assert [one for one in shown if one[1:] != [1, True]] == []
    assert page.evaluate("document.documentElement.scrollWidth") == width


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
    history = json.dumps(asdict(recorder.history()))
    page.evaluate(
        "Promise.all([import('/page/statistics/charts.js'),"
        " import('/page/statistics/latencies.js')]).then(([{ Charts }, { showLatencies }]) => {"
        " document.getElementById('charts').replaceChildren(); const charts = new Charts();"
        f" const history = {history}; showLatencies(history); charts.draw(history);"
        " charts.drawSpeed(1_000_600, 200); })"
    )
    page.wait_for("document.querySelector('.chart .value')?.textContent === '200'")
    assert page.texts(".chart h2") == ["Generated tokens/s", "First token", "KV cache in use"]
    first, blocks = page.texts(".chart .value")[1:]
    assert first.startswith("p50 2")
    assert blocks == "6.3%"
    line = page.evaluate("document.querySelector('.chart .series-0').getAttribute('d')")
    assert line.count("L") == 120
    assert line.startswith("M2.5 ")
    label = page.evaluate("document.querySelector('.chart svg').getAttribute('aria-label')")
    assert label == "Generated tokens/s over the last ten minutes; now 200"
    assert page.text("#latencies tr td").endswith("ms")


@pytest.mark.parametrize(
    ("uptime_s", "speed", "values", "tops"),
    [
        (20, 0, ["no calls yet", "no calls yet", "33%"], ["", "", "100%"]),
        (700, 0, ["no recent calls", "no recent calls", "33%"], ["", "", "100%"]),
        # The scale includes the present speed.
        (700, 4652.4, ["4,652", "no recent calls", "33%"], ["7,500", "", "100%"]),
    ],
)
def test_charts_show_speeds_or_that_there_are_no_calls(
    page: ChatPage, uptime_s: float, speed: float, values: list[str], tops: list[str]
) -> None:
    page.evaluate(
        "import('/page/statistics/charts.js').then(({ Charts }) => {"
        " document.getElementById('charts').replaceChildren(); const charts = new Charts();"
        f" const sample = {{ uptime_s: {uptime_s}, generated_tokens_per_s: {min(speed, 20)},"
        " first_token_p50_s: null, first_token_p95_s: null, num_used_blocks: 1 };"
        " charts.draw({ num_blocks: 3, samples: [sample] });"
        f" charts.drawSpeed({uptime_s + 1}, {speed}); window.isDone = true; }})"
    )
    page.wait_for("window.isDone")
    assert page.texts(".chart .value") == values
    assert page.texts(".plot .top") == tops


def test_large_numbers_have_separators(page: ChatPage, http: httpx.Client) -> None:
    loads = http.get("/loads").json()
    call = {"id": "a", "age_s": 1, "num_prompt_tokens": 31_000, "num_generated_tokens": 1_234}
    loads |= {"num_blocks": 32_768, "num_free_blocks": 30_000, "num_waiting": 2_001}
    given = json.dumps(loads | {"num_cached_blocks": 0, "num_preemptions": 1_000, "calls": [call]})
    page.evaluate(
        f"import('/page/statistics/load_view.js').then(({{ LoadView }}) => {{"
        f" new LoadView().show({given}); window.shown = ['device-text', 'waiting', 'preemptions',"
        " 'calls-body'].map((id) => document.getElementById(id).textContent); })"
    )
    page.wait_for("window.shown !== undefined")
    assert page.evaluate("window.shown") == [
        "2,768 of 32,768",
        "2,001",
        "1,000",
        "a1.0 s31,0001,234",
    ]


def test_pointer_shows_the_values_of_a_moment(page: ChatPage) -> None:
    page.evaluate(
        "import('/page/statistics/line_chart.js').then(({ LineChart }) => {"
        " const chart = new LineChart('Test', ['p50', 'p95'], String);"
        " document.getElementById('charts').prepend(chart.node);"
        " chart.draw([{age: 590, values: [null, null]}, {age: 10, values: [9, null]}]);"
        " window.isDone = true; })"
    )
    page.wait_for("window.isDone")
    assert page.text(".chart .value") == "p50 9, p95 -"
    box = page.evaluate(
        "(({x, y, width, height}) => ({x, y, width, height}))"
        "(document.querySelector('.chart svg').getBoundingClientRect())"
    )
    page.browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=box["x"] + 4, y=box["y"] + 9)
    page.wait_for("document.querySelector('.chart .value').textContent === '- \u00b7 590 s ago'")
