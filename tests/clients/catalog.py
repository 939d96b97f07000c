"""The programs that `python -m tests.clients` runs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PROGRAMS", "Program"]


@dataclass(frozen=True, slots=True)
class Program:
    """A script in `programs`, which gets the URL of a server and the folder of its model."""

    name: str
    packages: tuple[str, ...]
    """What its environment needs."""


PROGRAMS = (
    Program("anthropic_messages", ("anthropic",)),
    Program("autogen_agent", ("autogen-agentchat", "autogen-ext[openai]")),
    Program("guidellm_benchmark", ("guidellm",)),
    Program("openai_agents", ("openai-agents",)),
    Program("openai_responses", ("openai",)),
    Program("lm_eval_tasks", ("lm-eval[api]", "transformers")),
)
