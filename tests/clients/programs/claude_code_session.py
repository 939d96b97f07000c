"""Claude Code without a terminal: two rounds with its shell tool, and an answer."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def main(url: str, folder: str) -> None:
    claude = Path(sys.prefix) / "node_modules" / ".bin" / "claude"
    model = Path(folder).name
    with tempfile.TemporaryDirectory() as name:
        home, work = Path(name) / "home", Path(name) / "work"
        home.mkdir()
        work.mkdir()
        command = [str(claude), "-p", "Write a note and read it.", "--model", model]
        command += ["--output-format", "stream-json", "--verbose", "--allowedTools", "Bash"]
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            cwd=work,
            # Nothing of the user's is read or sent.
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "ANTHROPIC_API_KEY": "none",
                "ANTHROPIC_BASE_URL": url,
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            },
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert (work / "note.txt").read_text() == "first\n"
    events = [json.loads(line) for line in done.stdout.splitlines()]
    ended = events[-1]
    assert (ended["type"], ended["is_error"]) == ("result", False), ended
    assert ended["result"] == "The note says first.", ended
    blocks = [
        block
        for event in events
        if event["type"] in ("assistant", "user")
        for block in event["message"]["content"]
    ]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    assert texts == ["I write the file.", "I read it now.", "The note says first."], blocks
    results = [block for block in blocks if block["type"] == "tool_result"]
    assert [result["is_error"] for result in results] == [False, False], results
    assert results[1]["content"] == "first", results


if __name__ == "__main__":
    main(*sys.argv[1:])
