"""guidellm's benchmark: every request must succeed; it exits with 0 if they fail."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

NUM_REQUESTS = 4


def main(url: str, folder: str) -> None:
    with tempfile.TemporaryDirectory() as output:
        result = Path(output) / "benchmarks.json"
        command = [
            str(Path(sys.executable).with_name("guidellm")),
            "benchmark",
            f"--target={url}",
            "--model=tiny-llama",
            f"--processor={folder}",
            "--data=prompt_tokens=32,output_tokens=8",
            "--profile=synchronous",
            f"--max-requests={NUM_REQUESTS}",
            f"--output-path={result}",
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
        (benchmark,) = json.loads(result.read_text())["benchmarks"]
        requests = benchmark["requests"]
        assert len(requests["successful"]) == NUM_REQUESTS, requests["errored"]
        assert not requests["errored"]


if __name__ == "__main__":
    main(*sys.argv[1:])
