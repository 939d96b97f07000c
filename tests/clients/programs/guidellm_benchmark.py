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
            "run",
            "--backend",
            f"kind=openai_http,target={url},model=tiny-llama",
            "--profile",
            "kind=synchronous",
            "--constraint",
            f"kind=max_requests,count={NUM_REQUESTS}",
            "--tokenizer",
            f"kind=hf_auto,model={folder}",
            "--data",
            "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
            "--output",
            f"kind=json,path={result}",
            "--disable-console",
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
        (benchmark,) = json.loads(result.read_text())["benchmarks"]
        requests = benchmark["requests"]
        assert len(requests["successful"]) == NUM_REQUESTS, requests["errored"]
        assert not requests["errored"]


if __name__ == "__main__":
    main(*sys.argv[1:])
