"""The benchmark of vLLM, for completions and chat: every request must succeed."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

NUM_REQUESTS = 8
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


def main(url: str, folder: str) -> None:
    for backend, endpoint in ENDPOINTS.items():
        with tempfile.TemporaryDirectory() as output:
            command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
            command += ["--backend", backend, "--base-url", url, "--endpoint", endpoint]
            command += ["--model", Path(folder).name, "--tokenizer", folder]
            command += ["--dataset-name", "random", "--num-prompts", str(NUM_REQUESTS)]
            command += ["--random-input-len", "32", "--random-output-len", "8", "--ignore-eos"]
            command += ["--save-result", "--result-dir", output, "--result-filename", "result.json"]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=300, check=False, cwd=output
            )
            assert done.returncode == 0, done.stdout + done.stderr
            result = json.loads((Path(output) / "result.json").read_text())
        assert result["completed"] == NUM_REQUESTS, result
        assert result["failed"] == 0, result
        assert result["total_output_tokens"] == 8 * NUM_REQUESTS, result


if __name__ == "__main__":
    main(*sys.argv[1:])
