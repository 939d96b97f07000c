"""Open WebUI's own server: it lists the model, and passes a conversation on, whole and streamed."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

MESSAGES = [{"role": "user", "content": "What does Queue.put do?"}]
START_TIMEOUT_S = 240.0


def main(url: str, folder: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("open-webui")), "serve"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryDirectory() as data:
        settings = {
            "DATA_DIR": data,
            "ENABLE_OLLAMA_API": "False",
            "HF_HUB_OFFLINE": "1",
            "OFFLINE_MODE": "True",
            "OPENAI_API_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": "none",
            # Otherwise it downloads a model that embeds documents.
            "RAG_EMBEDDING_ENGINE": "openai",
            "WEBUI_AUTH": "False",
            "WEBUI_SECRET_KEY": "none",
        }
        with (Path(data) / "log.txt").open("w") as log:
            server = subprocess.Popen(
                command, env={**os.environ, **settings}, cwd=data, stdout=log, stderr=log
            )
            try:
                check(f"http://127.0.0.1:{port}", url, Path(folder).name)
            except Exception:
                print((Path(data) / "log.txt").read_text()[-4000:], file=sys.stderr)
                raise
            finally:
                server.terminate()
                server.wait(30)


def check(url: str, plain_url: str, model: str) -> None:
    with httpx.Client(base_url=url, timeout=60) as client:
        wait_until_ready(client)
        signed_in = client.post(
            "/api/v1/auths/signin", json={"email": "admin@localhost", "password": "admin"}
        )
        client.headers["Authorization"] = f"Bearer {signed_in.json()['token']}"
        assert model in [one["id"] for one in client.get("/api/models").json()["data"]]
        asked = {"model": model, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
        answer = client.post("/api/chat/completions", json={**asked, "stream": False}).json()
        text = answer["choices"][0]["message"]["content"]
        plain = httpx.post(f"{plain_url}/v1/chat/completions", json=asked, timeout=60).json()
        assert text == plain["choices"][0]["message"]["content"], answer
        lines = client.post("/api/chat/completions", json={**asked, "stream": True}).text
        pieces = [
            choice["delta"].get("content") or ""
            for line in lines.splitlines()
            if line.startswith("data: {")
            for choice in json.loads(line[6:]).get("choices", ())
        ]
        assert "".join(pieces) == text, lines


def wait_until_ready(client: httpx.Client) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    raise AssertionError("Open WebUI did not start.")


if __name__ == "__main__":
    main(*sys.argv[1:])
