"""Users who write again some time after each answer."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp

from bench.frontend_server import MODEL

if TYPE_CHECKING:
    import argparse

__all__ = ["Conversations", "run_conversations"]

_MAX_WORDS = 130
"""Of a first message: a conversation fits in the context of 1 024 tokens."""


@dataclass(slots=True, kw_only=True)
class Conversations:
    """The times that the users of one run saw."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_failed: int = 0
    ttft_s: list[float] = field(default_factory=list)
    """Of every turn but the first ones."""


async def run_conversations(options: argparse.Namespace, url: str) -> Conversations:
    """Return what all users saw, once each has had its last answer."""
    seen = Conversations()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session:
        users = (_converse(options, session, seen, one) for one in range(options.num_conversations))
        await asyncio.gather(*users)
    return seen


async def _converse(
    options: argparse.Namespace, session: aiohttp.ClientSession, seen: Conversations, number: int
) -> None:
    draws = random.Random(number)
    messages: list[dict[str, str]] = []
    await asyncio.sleep(draws.random() * options.think_s)
    for turn in range(options.num_turns):
        num_words = draws.randint(4, 12)
        if not turn:
            num_words += int(draws.expovariate(1 / options.num_first_words))
        messages.append({"role": "user", "content": _words(draws, min(num_words, _MAX_WORDS))})
        began_s = time.perf_counter()
        try:
            text, first_s = await _answer(options, session, seen, messages)
        except (aiohttp.ClientError, TimeoutError):
            seen.num_failed += 1
            return
        if turn:
            seen.ttft_s.append(first_s - began_s)
        messages.append({"role": "assistant", "content": text})
        await asyncio.sleep(draws.expovariate(1 / options.think_s))


async def _answer(
    options: argparse.Namespace,
    session: aiohttp.ClientSession,
    seen: Conversations,
    messages: list[dict[str, str]],
) -> tuple[str, float]:
    """Return the text, and when its first part arrived. Raises ClientError."""
    body = {
        "model": MODEL.name,
        "messages": messages,
        "max_tokens": options.num_answer_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, first_s = "", 0.0
    async with session.post("/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            data = line.removeprefix(b"data: ").strip()
            if not data.startswith(b"{"):
                continue
            event = json.loads(data)
            if (error := event.get("error")) is not None:
                raise aiohttp.ClientPayloadError(error["message"])
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                first_s = first_s or time.perf_counter()
            if usage := event.get("usage"):
                seen.num_prompt_tokens += usage["prompt_tokens"]
                seen.num_cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
    return text, first_s


def _words(draws: random.Random, number: int) -> str:
    return " ".join(
        draws.choice(("def", "class", "return", "self")) + str(draws.randrange(100))
        for _ in range(number)
    )
