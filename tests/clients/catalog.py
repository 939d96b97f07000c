"""The programs that `python -m tests.clients` runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["PROGRAMS", "Program"]

_ROOT = Path(__file__).parents[2]
_TORCH = next(
    line for line in (_ROOT / "constraints.txt").read_text().splitlines() if line[:7] == "torch=="
)
"""A version that is pinned may resolve to a smaller build."""


@dataclass(frozen=True, slots=True)
class Program:
    """A script in `programs`, which gets the URL of a server and the folder of its model."""

    name: str
    packages: tuple[str, ...] = ()
    """The packages of its environment, as arguments of `pip install`."""
    node_packages: tuple[str, ...] = ()
    """Its packages from npm."""
    turns: tuple[tuple[str, ...], ...] = ()
    """What a scripted model says in each turn, in pieces; without, the shipped model serves."""
    flags: tuple[str, ...] = ()
    """Of the scripted model's server."""
    without_needs: tuple[str, ...] = ()
    """Packages that are installed afterwards, without their dependencies."""


PROGRAMS = (
    Program("anthropic_messages", ("anthropic",)),
    Program(
        "anthropic_thinking",
        ("anthropic",),
        turns=(("<think>", "One,", " two,", " three.", "</think>", "It is six."),),
        flags=("--reasoning-format=qwen3",),
    ),
    Program("autogen_agent", ("autogen-agentchat", "autogen-ext[openai]")),
    Program(
        "claude_code_session",
        node_packages=("@anthropic-ai/claude-code",),
        turns=(
            (
                "I write the file.",
                '\n<tool_call>\n{"name": "Bash", "arguments": {"command": ',
                '"echo first > note.txt", "description": "Write"}}\n</tool_call>',
            ),
            (
                "I read it now.",
                '\n<tool_call>\n{"name": "Bash", "arguments": ',
                '{"command": "cat note.txt", "description": "Read"}}\n</tool_call>',
            ),
            ("The note", " says first."),
        ),
    ),
    Program(
        "codex_session",
        node_packages=("@openai/codex",),
        turns=(
            (
                "I write the file.",
                '\n<tool_call>\n{"name": "exec_command", "arguments": {"cmd": ',
                '"echo first > note.txt"}}\n</tool_call>',
            ),
            (
                "I read it now.",
                '\n<tool_call>\n{"name": "exec_command", "arguments": ',
                '{"cmd": "cat note.txt"}}\n</tool_call>',
            ),
            ("The note", " says first."),
        ),
    ),
    Program("guidellm_benchmark", ("guidellm",)),
    Program("inspect_ai_task", ("inspect-ai", "openai")),
    Program("instructor_models", ("instructor",)),
    Program("langchain_chat", ("langchain-openai",)),
    # It imports mcp for calls with tools, but does not require it.
    Program("litellm_calls", ("litellm", "mcp")),
    Program("open_webui", (_TORCH, "open-webui")),
    Program("openai_agents", ("openai-agents",)),
    Program("openai_chat", ("openai",)),
    Program("openai_responses", ("openai",)),
    Program("pydantic_ai_agent", ("pydantic-ai-slim[openai]",)),
    Program("lm_eval_tasks", ("lm-eval[api]", "transformers")),
    Program(
        "ray_serve_llm",
        (
            "--constraint",
            str(_ROOT / "constraints.txt"),
            "--editable",
            str(_ROOT),
            # What vLLM imports without a GPU, and the library behind it.
            "cachetools",
            "cbor2",
            "cloudpickle",
            "httpx",
            "openai",
            "openai-harmony",
            "pillow",
            "py-cpuinfo",
            "pyarrow",
            "pybase64",
            "python-multipart",
            "pyzmq",
            "transformers",
        ),
        # The library imports an engine; with later versions of FastAPI its ingress answers 400.
        without_needs=("vllm==0.33.0", "fastapi==0.121.3", "starlette==0.49.3"),
    ),
    Program(
        "vllm_bench",
        (
            # What vLLM imports for its benchmark.
            _TORCH,
            "aiohttp",
            "blake3",
            "cachetools",
            "cbor2",
            "cloudpickle",
            "compressed-tensors",
            "depyf",
            "diskcache",
            "einops",
            "fastapi",
            "gguf",
            "httpx",
            "ijson",
            "lark",
            "llguidance",
            "mcp",
            "mistral-common",
            "model-hosting-container-standards",
            "msgspec",
            "openai",
            "openai-harmony",
            "opentelemetry-api",
            "orjson",
            "outlines-core",
            "partial-json-parser",
            "pillow",
            "prometheus-client",
            "psutil",
            "py-cpuinfo",
            "pyarrow",
            "pybase64",
            "python-json-logger",
            "python-multipart",
            "pyzmq",
            "regex",
            "sentencepiece",
            "setproctitle",
            "tiktoken",
            "transformers",
            "uvloop",
            "watchfiles",
            "xgrammar",
        ),
        without_needs=("vllm==0.33.0",),
    ),
)
