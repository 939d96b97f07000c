"""The settings of the page, its statistics, and calls of tools."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import pytest

from cluster.serving.intake import ReaderLimits
from cluster.serving.openai.bodies.chat_body import ChatBody
from tests.serving.admin.page.chat_page import ChatPage
from tests.serving.conftest import Server
from tests.serving.openai.test_tools import AUTO, TEMPLATE, TOOLS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import httpx

    from cluster.serving.text.tokenizer import Tokenizer
    from tests.serving.admin.page.chromium import Browser
    from tests.serving.fake_engine import FakeEngine

pytestmark = pytest.mark.slow

OWN_NAMES = {"system", "schema", "more"}
"""Fields that are no parameters themselves."""


def test_settings_are_sent_and_empty_ones_are_not(page: ChatPage, engine: FakeEngine) -> None:
    page.speak("yes")
    page.set(top_p=0.5, top_k=7, seed=3, presence_penalty=0.5, max_completion_tokens=2)
    page.set(stop="zz\n yy", stop_token_ids="5, 6", ignore_eos=True, logit_bias='{"7": 1.5}')
    page.set(system="Be brief.", more='{"min_tokens": 1}')
    page.ask("hello")
    sampling = engine.log.submitted[0].sampling
    assert (sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 7, 3)
    assert (sampling.presence_penalty, tuple(sampling.stop)) == (0.5, ("zz", " yy"))
    assert (tuple(sampling.stop_token_ids), sampling.ignore_eos) == ((5, 6), True)
    assert sampling.min_tokens == 1
    assert (sampling.min_p, sampling.repetition_penalty, sampling.frequency_penalty) == (0, 1, 0)
    assert "Be brief." in page.prompt()


def test_every_field_is_a_parameter_of_chats(page: ChatPage) -> None:
    names = page.evaluate(
        "[...document.getElementById('settings-form').elements].map((one) => one.name)"
    )
    assert {name for name in names if name} - OWN_NAMES <= set(ChatBody.model_fields)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("tools", "[{", "tools must be JSON"),
        ("more", '"top_k"', "more must be a JSON object."),
        ("more", "[1]", "more must be a JSON object."),
    ],
)
def test_invalid_settings_are_named_and_nothing_is_sent(
    page: ChatPage, engine: FakeEngine, name: str, text: str, problem: str
) -> None:
    page.set(**{name: text})
    page.say("hello")
    page.wait_for("document.querySelector('.message .problem') !== null")
    assert page.text(".message .problem p").startswith(problem)
    assert engine.log.submitted == []


def test_settings_are_kept_until_they_are_reset(page: ChatPage) -> None:
    page.set(temperature=0.25)
    page.load()
    assert page.evaluate("document.getElementsByName('temperature')[0].value") == "0.25"
    page.click("#settings-button")
    page.click("#settings-reset")
    page.load()
    assert page.evaluate("document.getElementsByName('temperature')[0].value") == ""


def test_escape_closes_the_settings_and_stops_nothing(page: ChatPage, engine: FakeEngine) -> None:
    engine.step_s = 0.05
    page.say("hello")
    page.wait_for("document.querySelector('.markdown p')?.textContent.length > 0")
    page.click("#settings-button")
    page.browser.press("Escape")
    page.wait_for("!document.getElementById('settings').open")
    assert engine.num_sequences == 1
    page.browser.press("Escape")
    page.wait_for("!document.getElementById('send').hidden")


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
        " 'drafts', 'calls-body'].map((id) => document.getElementById(id).textContent); })"
    )
    page.wait_for("window.shown !== undefined")
    assert page.evaluate("window.shown") == [
        "2,768 of 32,768",
        "2,001",
        "1,000",
        # Of 20 drafts of 5 sequences in steps.
        "35%, 2.4 tokens/step",
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


@pytest.fixture(scope="module")
def tool_server(template_tokenizer: Callable[..., Tokenizer]) -> Iterator[Server]:
    limits = ReaderLimits(resume_grace_s=3600.0)
    with Server(template_tokenizer(TEMPLATE), context=2048, reader_limits=limits) as server:
        yield server


def test_calls_are_shown_and_their_results_are_sent(browser: Browser, tool_server: Server) -> None:
    with ChatPage(browser, tool_server) as page:
        page.set(tools=json.dumps(TOOLS))
        page.speak(AUTO)
        page.ask("How is it?")
        assert page.text(".markdown") == "I ask."
        assert page.texts(".tool h3 strong") == ["weather", "time"]
        assert json.loads(page.text(".tool pre code")) == {"city": "K\u00f6ln \U0001f642"}
        page.evaluate("document.querySelectorAll('.tool textarea')[0].value = 'sunny <b>'")
        page.evaluate("document.querySelectorAll('.tool textarea')[1].value = 'noon'")
        page.speak("It is sunny.")
        page.click(".send-results")
        page.wait_for("document.querySelectorAll('.timing').length === 2")
        prompt = page.prompt()
        assert prompt.index("weather") < prompt.index("sunny <b>") < prompt.index("noon")
        assert page.texts(".tool details p") == ["sunny <b>", "noon"]
        # The history has them too.
        page.load()
        page.click("#chats .open")
        assert page.texts(".tool details p") == ["sunny <b>", "noon"]
        assert page.count(".tool textarea") == 0
        assert page.console == []


def test_calls_without_results_ask_again_when_they_are_opened(
    browser: Browser, tool_server: Server
) -> None:
    with ChatPage(browser, tool_server) as page:
        page.set(tools=json.dumps(TOOLS))
        page.speak(AUTO)
        page.ask("How is it?")
        page.load()
        page.click("#chats .open")
        assert page.count(".tool textarea") == 2


def test_an_answer_that_is_drawn_late_asks_for_no_results_of_another_chat(
    browser: Browser, tool_server: Server
) -> None:
    hold = (
        "import('/page/markdown/lexer.js').then(({ lexer }) => {"
        " const held = []; const lex = lexer.ask.bind(lexer);"
        " lexer.ask = async (text) => { await new Promise((wake) => held.push(wake));"
        " return lex(text); };"
        " window.release = () => { lexer.ask = lex; held.forEach((wake) => wake()); }; })"
    )
    with ChatPage(browser, tool_server) as page:
        page.set(tools=json.dumps(TOOLS))
        page.speak(AUTO)
        page.ask("How is it?")
        page.click("#new-chat")
        page.evaluate(hold)
        page.say("How is it now?")
        received = "document.querySelectorAll('.tool').length === 2"
        page.wait_for(f"{received} && document.querySelector('.running') === null")
        page.click("#chats .open")
        page.evaluate("window.release()")
        page.wait_for("document.querySelectorAll('.timing').length === 1")
        page.wait_for("document.querySelector('.send-results') !== null")
        # Another button would follow.
        page.evaluate("new Promise((wake) => setTimeout(wake, 100))")
        assert page.count(".tool textarea") == 2
        assert page.count(".send-results") == 1
