"""What calls of an attack make the engine compute, where they are valid work of the model."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineWork"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWork:
    """The requests of a call."""

    prompt: str | tuple[int, ...]
    max_tokens: int
    num_prompts: int = 1
    """How often a call has the prompt."""
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    fills_rows: bool = False
    """Whether another sequence begins as soon as one ends, in all rows that the engine has.
    Otherwise as many begin in a second as the server let through."""
    max_num_batched_tokens: int = 2048
    """The server's option."""
