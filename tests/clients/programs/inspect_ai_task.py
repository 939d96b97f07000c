"""inspect-ai: a task of two samples, through its provider for OpenAI's API and for vLLM."""

import os
import sys
import tempfile

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes

SAMPLES = [
    Sample(input="What does Queue.put do?", target="e"),
    Sample(input="And get?", target="e"),
]


def main(url: str, folder: str) -> None:
    os.environ |= {
        "VLLM_BASE_URL": f"{url}/v1",
        "VLLM_API_KEY": "none",
        "PAGEDRAY_BASE_URL": f"{url}/v1",
        "PAGEDRAY_API_KEY": "none",
    }
    for model in ("openai-api/pagedray/tiny-llama", "vllm/tiny-llama"):
        with tempfile.TemporaryDirectory() as logs:
            (log,) = eval(
                Task(dataset=SAMPLES, scorer=includes()),
                model=model,
                log_dir=logs,
                display="plain",
                max_tokens=24,
                temperature=0,
                seed=3,
                reasoning_effort="low",
                max_retries=0,
            )
            # It reads them from the folder.
            assert log.status == "success", log.error
            assert all(sample.output.completion for sample in log.samples), model


if __name__ == "__main__":
    main(*sys.argv[1:])
