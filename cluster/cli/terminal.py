"""`pagedray generate` and `pagedray chat`."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cluster.cli.text_llm import TextLLM
from pagedray.errors import InvalidRequestError
from pagedray.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.engine.options.engine_options import EngineOptions
    from cluster.llm import LLM

__all__ = ["chat", "generate"]


# Any: fields of sampling parameters, of all types, here and below.
def generate(
    model: str, options: EngineOptions, text: str, given: Mapping[str, Any], is_json: bool
) -> int:
    """Print the completion of `text`, as it is generated or as one JSON object.

    `given` are the sampling parameters that the user sets.
    """
    with _loaded(model, options) as llm:
        sampling = _sampling(llm, given)
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


def chat(
    model: str,
    options: EngineOptions,
    given: Mapping[str, Any],
    *,
    system_prompt: str | None = None,
) -> int:
    """Chat until end-of-file or an empty line; `given` is as in `generate`."""
    beginning = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    with _loaded(model, options) as llm:
        if not llm.get_tokenizer().has_chat_template:
            raise InvalidRequestError(
                "The model has no chat template; use `pagedray generate`, or --chat-template."
            )
        sampling = _sampling(llm, given)
        print("Type a message; an empty line or Ctrl-D exits.", file=sys.stderr)
        messages = list(beginning)
        while line := _read_line():
            messages.append({"role": "user", "content": line})
            try:
                answer = _answer(llm, messages, sampling)
            except InvalidRequestError as error:
                print(f"{error} Starting a new conversation.", file=sys.stderr)
                messages = list(beginning)
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


def _sampling(llm: LLM, given: Mapping[str, Any]) -> SamplingParams:
    """Return parameters of the user, of the model's file, or greedy ones, in this order."""
    fields: dict[str, Any] = {"temperature": 0.0, **llm.recommended_sampling, **given}
    return SamplingParams(**fields)


def _loaded(model: str, options: EngineOptions) -> LLM:
    return TextLLM(model, **asdict(options))


def _read_line() -> str:
    """Return the next message; an empty one at the end of the input."""
    # A closed stream is None.
    if sys.stdin is None:
        return ""
    try:
        # Output that is read by a program has only the answers.
        if not sys.stdin.isatty() or sys.stdout is None:
            return sys.stdin.readline().strip()
        return input("> ").strip()
    except EOFError:
        print()
        return ""
    except UnicodeDecodeError as error:
        raise InvalidRequestError("The message is not UTF-8.") from error
