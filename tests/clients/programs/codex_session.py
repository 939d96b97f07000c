"""Codex without a terminal: two rounds with its shell tool, and an answer, over Responses."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROVIDER = (
    '{{name="PagedRay", base_url="{url}/v1", wire_api="responses", env_key="OPENAI_API_KEY"}}'
)


def main(url: str, folder: str) -> None:
    codex = Path(sys.prefix) / "node_modules" / ".bin" / "codex"
    with tempfile.TemporaryDirectory() as name:
        home, work = Path(name) / "home", Path(name) / "work"
        home.mkdir()
        work.mkdir()
        settings = (
            "model_provider=pagedray",
            f"model_providers.pagedray={PROVIDER.format(url=url)}",
            # The server has no access to the web.
            "web_search=disabled",
        )
        command = [str(codex), "exec", "--json", "--skip-git-repo-check", "--cd", str(work)]
        # It may only run what the scripted model says.
        command.append("--dangerously-bypass-approvals-and-sandbox")
        for setting in settings:
            command += ["-c", setting]
        done = subprocess.run(
            [*command, "--model", Path(folder).name, "Write a note and read it."],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            # Nothing of the user's is read or sent.
            env={"PATH": os.environ["PATH"], "HOME": str(home), "OPENAI_API_KEY": "none"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert (work / "note.txt").read_text() == "first\n"
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert not [event for event in events if event["type"] in ("error", "turn.failed")], events
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    texts = [item["text"] for item in items if item["type"] == "agent_message"]
    assert texts == ["I write the file.", "I read it now.", "The note says first."], items
    runs = [item for item in items if item["type"] == "command_execution"]
    assert [run["exit_code"] for run in runs] == [0, 0], items
    assert runs[1]["aggregated_output"].strip() == "first", items


if __name__ == "__main__":
    main(*sys.argv[1:])
