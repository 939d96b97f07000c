"""`pagedray generate` and `pagedray chat`: a model in the terminal."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from cluster.llm import LLM

if TYPE_CHECKING:
    from cluster.options import EngineOptions
    from pagedray.request import SamplingParams

__all__ = ["chat", "generate"]


def generate(
    model: str, options: EngineOptions, text: str, sampling: SamplingParams, is_json: bool
) -> int:
    """Print the continuation of `text`, as it grows or as one JSON object."""
    with _loaded(model, options) as llm:
        if is_json:
            started_s = time.perf_counter()
            (generation,) = llm.generate(text, sampling, show_progress=False)
            (completion,) = generation.completions
            report = {
                "prompt": text,
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
                "num_prompt_tokens": len(generation.prompt_token_ids),
                "num_generated_tokens": len(completion.token_ids),
                "seconds": round(time.perf_counter() - started_s, 6),
            }
            print(json.dumps(report))
            return 0
        print(text, end="", flush=True)
        for piece in llm.stream(text, sampling):
            print(piece, end="", flush=True)
        print()
    return 0


def chat(model: str, options: EngineOptions, sampling: SamplingParams) -> int:
    """Talk until end-of-file or an empty line."""
    with _loaded(model, options) as llm:
        print("An empty line or Ctrl-D ends the conversation.", file=sys.stderr)
        messages: list[dict[str, str]] = []
        while line := _read_line():
            messages.append({"role": "user", "content": line})
            answer = ""
            for piece in llm.stream(messages, sampling):
                print(piece, end="", flush=True)
                answer += piece
            print()
            messages.append({"role": "assistant", "content": answer})
    return 0


def _loaded(model: str, options: EngineOptions) -> LLM:
    return LLM(model, **asdict(options))


def _read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return ""
