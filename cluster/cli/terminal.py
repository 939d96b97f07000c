"""`pagedray generate` and `pagedray chat`."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from cluster.llm import LLM
from pagedray.errors import InvalidRequestError

if TYPE_CHECKING:
    from cluster.engine.options import EngineOptions
    from pagedray.request import SamplingParams

__all__ = ["chat", "generate"]


def generate(
    model: str, options: EngineOptions, text: str, sampling: SamplingParams, is_json: bool
) -> int:
    """Print the completion of `text`, as it is generated or as one JSON object."""
    with _loaded(model, options) as llm:
        if is_json:
            started_s = time.perf_counter()
            (generation,) = llm.generate(text, sampling, use_tqdm=False)
            (completion,) = generation.outputs
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
        pieces = llm.stream(text, sampling)
        # The first piece comes after the prompt was validated.
        print(text + next(pieces, ""), end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
    return 0


def chat(model: str, options: EngineOptions, sampling: SamplingParams) -> int:
    """Chat until end-of-file or an empty line."""
    with _loaded(model, options) as llm:
        print("Type a message; an empty line or Ctrl-D exits.", file=sys.stderr)
        messages: list[dict[str, str]] = []
        while line := _read_line():
            messages.append({"role": "user", "content": line})
            try:
                answer = _answer(llm, messages, sampling)
            except InvalidRequestError as error:
                print(f"{error} Starting a new conversation.", file=sys.stderr)
                messages.clear()
                continue
            messages.append({"role": "assistant", "content": answer})
    return 0


def _answer(llm: LLM, messages: list[dict[str, str]], sampling: SamplingParams) -> str:
    answer = ""
    for piece in llm.stream(messages, sampling):
        print(piece, end="", flush=True)
        answer += piece
    print()
    return answer


def _loaded(model: str, options: EngineOptions) -> LLM:
    return LLM(model, **asdict(options))


def _read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return ""
