"""`pagedray chat` and `pagedray generate` with a running server, in a terminal and in scripts."""

from __future__ import annotations

import io
import json
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from cluster.cli.commands import main
from tests.cli.terminal_emulator import Terminal
from tests.fakes import wait_for
from tests.quiet_server import QuietHandler, serving_by

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

END = "cut at --max-tokens]"


class EchoServer:
    """An OpenAI-compatible server that answers a message with its words, and `on` endlessly."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []  # Any: JSON values
        self.keys: list[str | None] = []
        self.num_aborted = 0


@contextmanager
def echoing() -> Iterator[EchoServer]:
    state = EchoServer()

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self._answer(200, {"data": [{"id": "echo"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            state.bodies.append(body)
            state.keys.append(self.headers["authorization"])
            text = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
            if text in ("400", "401", "503"):
                self._answer(int(text), {"error": {"message": f"It says {text}."}})
            elif not body.get("stream"):
                choice = {"text": text, "token_ids": [1, 2], "finish_reason": "stop"}
                usage = {"prompt_tokens": 3, "completion_tokens": 2}
                self._answer(200, {"choices": [choice], "usage": usage})
            else:
                self._stream(text, is_chat="messages" in body)

        def _stream(self, text: str, *, is_chat: bool) -> None:
            self.send_response(200)
            self.send_header("connection", "close")
            self.end_headers()
            words = text.split(" ")
            try:
                while True:
                    for number, word in enumerate(words):
                        piece = f" {word}" if number else word
                        field = "reasoning_content" if word == "hm" else "content"
                        delta = {"delta": {field: piece}} if is_chat else {"text": piece}
                        self._event({"choices": [delta]})
                    if text != "on":
                        break
                    time.sleep(0.01)
                if text == "cut":
                    return
                self._event({"choices": [{"delta": {}, "finish_reason": "length"}]})
                usage = {"prompt_tokens": 1, "completion_tokens": 10 * len(words)}
                self._event({"choices": [], "usage": usage})
                self.wfile.write(b"data: [DONE]\n\n")
            except ConnectionError:
                state.num_aborted += 1

        def _event(self, data: object) -> None:
            self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())

        def _answer(self, status: int, content: object) -> None:
            self.answer(status, json.dumps(content).encode())

    with serving_by(Handler) as state.url:
        yield state


@pytest.fixture
def server() -> Iterator[EchoServer]:
    with echoing() as found:
        yield found


@pytest.mark.parametrize(
    ("operands", "name"),
    [
        (["one two"], "echo"),
        (["other", "one two"], "other"),
        (["--max-tokens=7", "one two"], "echo"),
        (["other", "--max-tokens", "7", "one two"], "other"),
        (["--json", "other", "--max-tokens", "7", "one two"], "other"),
        (["other", "--top-p", "0.5", "one two", "--json"], "other"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "complete"])
def test_generate_sends_its_text_to_a_server(
    server: EchoServer,
    command: str,
    operands: Sequence[str],
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([command, f"--url={server.url}/v1", *operands]) == 0
    (body,) = server.bodies
    assert (body["model"], body["prompt"]) == (name, "one two")
    assert body["max_tokens"] == (7 if any("--max-tokens" in one for one in operands) else 64)
    assert body.get("top_p") == (0.5 if "--top-p" in operands else None)
    # The server has its own default.
    assert "temperature" not in body
    printed = capsys.readouterr()
    if "--json" in operands:
        report = json.loads(printed.out)
        assert (report["text"], report["token_ids"]) == ("one two", [1, 2])
        assert (report["num_prompt_tokens"], report["num_generated_tokens"]) == (3, 2)
        assert printed.err == ""
    else:
        assert printed.out == "one twoone two\n"
        assert printed.err.startswith("[20 tokens, ")
        assert " tokens/s, first after " in printed.err
        assert printed.err.endswith(f" ms, {END}\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["400"], 2, "pagedray: error: It says 400.\n"),
        (["401"], 1, "It says 401. Use --api-key-file or set PAGEDRAY_API_KEY.\n"),
        (["503"], 1, "The server responded with status 503: It says 503.\n"),
        (["503", "--json"], 1, "The server responded with status 503: It says 503.\n"),
        (["cut"], 1, "The connection to the server was lost; the answer is incomplete.\n"),
        (["x", "--dtype=float32"], 2, "dtype cannot be set for a running server; it is an option"),
        (["x", "--no-prefix-cache"], 2, "enable_prefix_cache cannot be set for a running server"),
        (["x", "--temperature=-1"], 2, "temperature must be"),
        (["x", "--tls-ca=ca.pem"], 2, "--tls-ca requires an https:// URL"),
        (["\udcff"], 2, "The text is not UTF-8."),
        ([], 2, "A prompt is required: pagedray generate [MODEL] TEXT.\n"),
    ],
)
def test_failures_are_one_line(
    server: EchoServer,
    arguments: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", f"--url={server.url}", *arguments]) == code
    error = capsys.readouterr().err.rpartition("pagedray: error:")[2]
    assert message.removeprefix("pagedray: error:") in error
    assert error.count("\n") == 1


def test_without_a_url_the_server_of_this_machine_is_used(
    server: EchoServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cluster.cli.server_connection.DEFAULT_URL", server.url)
    monkeypatch.setenv("PAGEDRAY_API_KEY", "secret-key")
    assert main(["generate", "one"]) == 0
    assert server.keys == ["Bearer secret-key"]
    monkeypatch.setattr("cluster.cli.server_connection.DEFAULT_URL", "http://127.0.0.1:1")
    for command in (["generate", "one"], ["chat"]):
        assert main(command) == 1
        assert "No server is running at http://127.0.0.1:1. Start one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "answer"), [("chat", "one two\n"), ("complete", "one twoone two\n")]
)
def test_vllms_flags_are_accepted(
    server: EchoServer, command: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--url", f"{server.url}/v1", "--model-name", "m", "--api-key", "k"]
    assert main([command, *flags, "--quick", "one two"]) == 0
    assert (server.bodies[0]["model"], server.keys) == ("m", ["Bearer k"])
    assert capsys.readouterr().out == answer


def test_a_single_message_that_is_rejected_is_a_failure(
    server: EchoServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", f"--url={server.url}", "--quick=400"]) == 2
    assert capsys.readouterr().err == "pagedray: error: It says 400.\n"


def test_messages_of_a_script_are_lines(
    server: EchoServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Neither an empty line nor a command is special.
    monkeypatch.setattr("sys.stdin", io.StringIO('one\n\n/exit\nhm """\n'))
    assert main(["chat", f"--url={server.url}", "--system-prompt=Be brief."]) == 0
    assert capsys.readouterr().out == 'one\n/exit\n """\n'
    roles = [message["role"] for message in server.bodies[-1]["messages"]]
    assert roles == ["system", *(2 * ["user", "assistant"]), "user"]


@pytest.fixture
def terminal(server: EchoServer) -> Iterator[Terminal]:
    with Terminal(["chat", f"--url={server.url}"], variables={"NO_COLOR": "1"}) as found:
        wait_for(lambda: found.text.rstrip().endswith("\n>") or "\n> " in found.text)
        yield found


def asked(server: EchoServer) -> list[str]:
    """Return the last message of each request."""
    return [str(body["messages"][-1]["content"]) for body in server.bodies]


def say(terminal: Terminal, server: EchoServer, keys: bytes) -> None:
    """Type a message, and wait for the end of its answer and for the next prompt.

    Without the prompt, keys that edit a line would be the terminal's own.
    """
    count = len(server.bodies)
    num_ends = terminal.written.count(END.encode())
    terminal.press(keys)
    wait_for(lambda: len(server.bodies) > count)
    wait_for(lambda: terminal.written.count(END.encode()) > num_ends)
    wait_for(lambda: terminal.text.rstrip().endswith("\n>"))


def test_ctrl_c_stops_an_answer_and_a_second_one_leaves(
    server: EchoServer, terminal: Terminal
) -> None:
    terminal.press(b"on\r")
    wait_for(lambda: "ononon" in terminal.text)
    terminal.press(b"\x03")
    wait_for(lambda: "Stopped after" in terminal.text)
    wait_for(lambda: server.num_aborted == 1)
    # What the model wrote is part of the conversation.
    say(terminal, server, b"go\r")
    messages = server.bodies[-1]["messages"]
    assert messages[1]["role"] == "assistant"
    assert messages[1]["content"].startswith("onon")
    terminal.press(b"half a line\x03")
    wait_for(lambda: "Press Ctrl-C again or Ctrl-D to leave." in terminal.text)
    terminal.press(b"\x03")
    assert terminal.process.wait(60.0) == 0
    assert "Traceback" not in terminal.text
    assert asked(server) == ["on", "go"]


def test_an_answer_that_is_stopped_twice_leaves(server: EchoServer, terminal: Terminal) -> None:
    terminal.press(b"on\r")
    wait_for(lambda: "ononon" in terminal.text)
    terminal.press(b"\x03")
    wait_for(lambda: "Stopped after" in terminal.text)
    terminal.press(b"\x03")
    assert terminal.process.wait(60.0) == 0


@pytest.mark.parametrize(
    "keys", [b"\x04", b"/exit\r", pytest.param(b"/bye\r", marks=pytest.mark.slow)]
)
def test_there_are_ways_to_leave(terminal: Terminal, keys: bytes) -> None:
    terminal.press(keys)
    assert terminal.process.wait(60.0) == 0


def test_messages_are_edited_like_lines_of_a_shell(server: EchoServer, terminal: Terminal) -> None:
    for keys, message in (
        (b"\r   \rone\r", "one"),
        (b'"""one\rtwo\r\rthree"""\r', "one\ntwo\n\nthree"),
        (b'"""\rone\r"""\r', "one"),
        (b'"""one"""\r', "one"),
        (b"ona\x1b[D\x7fe\x1b[C\x7f\r", "oe"),
        (b"\x1b[200~one\ntwo\x1b[201~\r", "one\ntwo"),
        (b"/etc/passwd has what?\r", "/etc/passwd has what?"),
        ("gr\u00fc\u00dfe\r".encode(), "gr\u00fc\u00dfe"),
    ):
        say(terminal, server, keys)
        assert asked(server).pop() == message
    assert len(server.bodies) == 8


def test_the_history_and_commands_repeat_messages(server: EchoServer, terminal: Terminal) -> None:
    say(terminal, server, b"one two\r")
    # The arrow upwards.
    say(terminal, server, b"\x1b[A\r")
    say(terminal, server, b"/retry\r")
    assert asked(server) == 3 * ["one two"]
    assert [len(body["messages"]) for body in server.bodies] == [1, 3, 3]
    terminal.press(b"/clear\r/nonsense\r")
    wait_for(lambda: "/nonsense is not a command." in terminal.text)
    terminal.press(b"/retry\r")
    wait_for(lambda: "There is no message to answer again." in terminal.text)
    terminal.press(b"/system Be brief.\r")
    say(terminal, server, b"three\r")
    system = {"role": "system", "content": "Be brief."}
    assert server.bodies[-1]["messages"] == [system, {"role": "user", "content": "three"}]


def test_a_failure_does_not_end_a_chat(server: EchoServer, terminal: Terminal) -> None:
    terminal.press(b"503\r")
    wait_for(lambda: "status 503: It says 503. /retry sends the message again." in terminal.text)
    say(terminal, server, b"one\r")
    terminal.press(b"400\r")
    wait_for(lambda: "It says 400. Starting a new conversation." in terminal.text)
    say(terminal, server, b"two\r")
    assert len(server.bodies[-1]["messages"]) == 1
