"""The settings of the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cluster.serving.openai.bodies.chat_body import ChatBody

if TYPE_CHECKING:
    from tests.serving.admin.page.chat_page import ChatPage
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
