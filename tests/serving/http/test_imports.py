"""Requests find all modules imported: an import would hold the event loop."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from tests.serving.checkpoint import write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import http.client, json, sys
from pathlib import Path
from cluster.serving.text.tokenizer import Tokenizer
from tests.serving.conftest import Server

def post(path, **body):
    connection = http.client.HTTPConnection("127.0.0.1", server.frontends.http_port)
    body = json.dumps({"model": "tiny", **body})
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    answer.read()

with Server(Tokenizer.from_folder(Path(sys.argv[1]))) as server:
    before = set(sys.modules)
    # Long enough that the server looks whether the client has left.
    post("/v1/completions", prompt=[[5] * 200] * 60, max_tokens=2)
    for stream in (False, True):
        post("/v1/completions", prompt="hello", max_tokens=2, stream=stream)
        messages = [{"role": "user", "content": "hello"}]
        for path in ("/v1/chat/completions", "/v1/messages"):
            post(path, messages=messages, max_tokens=2, stream=stream)
        post("/v1/responses", input="hello", max_output_tokens=2, stream=stream)
    print(sorted(set(sys.modules) - before))
"""


def test_requests_import_nothing(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    done = subprocess.run(
        (sys.executable, "-c", PROGRAM, tmp_path), capture_output=True, text=True, check=False
    )
    assert done.stdout == "[]\n", done.stderr
