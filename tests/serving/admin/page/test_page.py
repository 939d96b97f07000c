"""The page as a whole: its window, its controls, its security policy, and keys."""

from __future__ import annotations

import re
from importlib import resources
from typing import TYPE_CHECKING

import pytest

from cluster.serving.admin.endpoints import PAGE_PATHS
from cluster.serving.auth import digest_of, new_key
from tests.serving.admin.page.chat_page import ChatPage
from tests.serving.conftest import Server
from tests.slow_params import some_slow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

    from cluster.serving.text.tokenizer import Tokenizer
    from tests.serving.admin.page.chromium import Browser

TENANT, ADMIN = new_key(), new_key()


@pytest.fixture(scope="module")
def locked(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that requires keys."""
    path: Path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(
        f'[tenants.alice]\nkeys = ["sha256:{digest_of(TENANT).hex()}"]\n'
        f'[tenants.root]\nis_admin = true\nkeys = ["sha256:{digest_of(ADMIN).hex()}"]\n'
    )
    path.chmod(0o600)
    with Server(tokenizer, key_file=path) as server:
        yield server


@pytest.mark.parametrize("width", some_slow([360, 800, 1200, 1600], slow=[800, 1200]))
def test_page_fits_its_window(page: ChatPage, width: int) -> None:
    page.browser.look(width=width, height=740)
    page.speak("x" * 80 + "\n\n```\n" + "y" * 80 + "\n```\n\n|" + "z" * 30 + "|\n|-|\n")
    page.ask("w" * 150)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    send = page.evaluate("document.getElementById('send').getBoundingClientRect().bottom")
    assert send <= 740
    wide = page.evaluate(
        "[...document.querySelectorAll('.message')].filter((one) => "
        "one.getBoundingClientRect().right > innerWidth || one.scrollWidth > one.clientWidth)"
        ".length"
    )
    assert wide == 0


def test_controls_have_names_and_are_reached_by_keyboard(page: ChatPage) -> None:
    page.browser.look(width=1400, height=800)
    tree = page.browser.send("Accessibility.getFullAXTree")["nodes"]
    controls = [
        node
        for node in tree
        if node.get("role", {}).get("value") in ("button", "textbox", "spinbutton", "meter")
    ]
    assert len(controls) >= 6
    assert [node for node in controls if not node["name"]["value"]] == []
    page.evaluate("document.activeElement.blur()")
    wanted = {"settings-button", "new-chat", "text", "send", "history-button"}
    reached = set()
    # A control that the page writes anew loses the focus.
    for _ in range(60):
        page.browser.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
        if wanted <= reached:
            break
    assert wanted <= reached


def test_page_asks_for_a_key_and_keeps_it_in_memory(browser: Browser, locked: Server) -> None:
    locked.engine.reset()
    browser.look(width=1200, height=800)
    browser.open(locked.url)
    page = ChatPage(browser, locked)
    page.wait_for("document.getElementById('key-dialog').open")
    assert page.text("#status") == "API key required"
    browser.write("#key", "wrong")
    browser.press("Enter")
    page.wait_for("document.getElementById('key-problem').checkVisibility()")
    browser.write("#key", ADMIN)
    browser.press("Enter")
    page.wait_for("document.getElementById('status').textContent === 'Ready'")
    page.speak("yes")
    page.ask("hello")
    stored = page.evaluate(
        "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
    )
    assert "hello" in stored
    assert ADMIN not in stored
    assert page.evaluate("document.documentElement.outerHTML").count(ADMIN) == 0
    assert page.evaluate("document.getElementById('key').value") == ""
    # A browser that follows a link sends no key.
    assert page.evaluate("document.getElementById('idle-links').hidden") is True
    browser.open(locked.url)
    page.wait_for("document.getElementById('key-dialog').open")
    browser.open("data:text/html,")


def test_key_of_a_tenant_shows_no_totals(browser: Browser, locked: Server) -> None:
    browser.look(width=1200, height=800)
    browser.open(locked.url)
    page = ChatPage(browser, locked)
    page.wait_for("document.getElementById('key-dialog').open")
    browser.write("#key", TENANT)
    browser.press("Enter")
    page.wait_for("document.getElementById('no-totals').checkVisibility()")
    assert page.evaluate("document.getElementById('charts').hidden") is True
    assert page.text("#uptime") != ""
    browser.open("data:text/html,")


def test_an_unreachable_server_is_shown(page: ChatPage) -> None:
    page.evaluate("window.fetch = async () => { throw new TypeError('no network'); }")
    page.wait_for("document.getElementById('status').textContent === 'Unreachable'")
    page.say("hello")
    page.wait_for("document.querySelector('.message .problem') !== null")
    assert page.text(".message .problem p") == "The server cannot be reached."


def test_security_policy_allows_the_page_only(http: httpx.Client) -> None:
    for path in PAGE_PATHS:
        answer = http.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "require-trusted-types-for 'script'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        unchanged = http.get(path, headers={"if-none-match": answer.headers["etag"]})
        assert (unchanged.status_code, unchanged.content) == (304, b"")
    text = http.get("/").text
    assert re.findall(r"(?:https?:)?//[\w.]+", text) == []
    assert re.findall(r"<script(?![^>]*src)|style=|\son\w+=", text) == []


def test_scripts_make_no_html_of_text() -> None:
    folder = resources.files("cluster.serving.admin") / "web" / "page"
    own = [path for path in PAGE_PATHS if path.endswith(".js") and "/vendor/" not in path]
    assert len(own) > 20
    for path in own:
        script = (folder / path.removeprefix("/page/")).read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script
        )


def test_every_imported_script_is_served() -> None:
    folder = resources.files("cluster.serving.admin") / "web" / "page"
    for path in (path for path in PAGE_PATHS if path.endswith(".js")):
        script = (folder / path.removeprefix("/page/")).read_text()
        for name in re.findall(r'from "(\.[^"]+)"', script):
            parts = path.split("/")[:-1]
            for step in name.split("/"):
                if step == "..":
                    parts.pop()
                elif step != ".":
                    parts.append(step)
            assert "/".join(parts) in PAGE_PATHS, (path, name)
