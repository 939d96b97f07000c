"""How far the prompts of a conversation's next turns repeat its prompt.

The last tokens of a prompt, which begin the model's turn, often differ in the next prompt:
templates write a turn that has ended in another way, for example without its reasoning. A model
with recurrent states continues only from positions whose state was kept: the state at the prompt's
end would be of no use.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from hashlib import blake2b
from itertools import takewhile
from typing import TYPE_CHECKING

from cluster.serving.text.template_arguments import ChatMessage, MessageToolCall
from pagedray.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.serving.text.template_arguments import ChatPrompt
    from cluster.serving.text.tokenizer import Tokenizer

__all__ = ["StablePositions"]

_MAX_COUNTED = 1024
_ROLES_OF_INSTRUCTIONS = ("system", "developer")
_ANSWER = ChatMessage("assistant", "x")
_QUESTION = ChatMessage("user", "x")
_CALL = MessageToolCall(id="call00000", name="x", arguments={})
_RESULT = ChatMessage("tool", "x", tool_call_id=_CALL.id, name=_CALL.name)
_NEXT_TURNS = ((_ANSWER, _QUESTION), (ChatMessage("assistant", "", tool_calls=(_CALL,)), _RESULT))
"""Messages that a client may append: a question, or the result of a tool call."""


class StablePositions:
    """Finds the positions by rendering conversations that begin alike; thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._counted: dict[bytes, int] = {}
        """Tokens of texts, by digest: many conversations have the same instructions."""

    def of(self, prompt: ChatPrompt, num_tokens: int) -> tuple[int, ...]:
        """Return the ends of prefixes that other prompts will have, in tokens, ascending.

        `num_tokens` is the length of the prompt. There are none if it continues a message.
        """
        if prompt.continues_final_message or not prompt.adds_generation_prompt:
            return ()
        text = self._tokenizer.render_chat(prompt)
        positions = {
            num_tokens - self._num_tokens(text[_common_length(text, later) :])
            for later in self._later_texts(prompt)
        }
        first = tuple(takewhile(_has_instructions, prompt.messages))
        if first or prompt.tools:
            other = self._rendered(replace(prompt, messages=(*first, _QUESTION)))
            if other is not None:
                positions.add(self._counted_tokens(text[: _common_length(text, other)]))
        return tuple(sorted(position for position in positions if 0 < position < num_tokens))

    def _later_texts(self, prompt: ChatPrompt) -> Iterator[str]:
        """Yield prompts of next turns, except prompts that the template rejects."""
        for messages in _NEXT_TURNS if prompt.tools else _NEXT_TURNS[:1]:
            text = self._rendered(replace(prompt, messages=prompt.messages + messages))
            if text is not None:
                yield text

    def _rendered(self, prompt: ChatPrompt) -> str | None:
        try:
            return self._tokenizer.render_chat(prompt)
        except InvalidRequestError:
            return None

    def _counted_tokens(self, text: str) -> int:
        digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        number = self._counted.get(digest)
        if number is None:
            if len(self._counted) >= _MAX_COUNTED:
                self._counted.clear()
            number = self._counted[digest] = self._num_tokens(text)
        return number

    def _num_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False)) if text else 0


def _has_instructions(message: ChatMessage) -> bool:
    return message.role in _ROLES_OF_INSTRUCTIONS


def _common_length(first: str, second: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    ends = range(min(len(first), len(second)) + 1)
    return bisect_left(ends, True, key=lambda end: first[:end] != second[:end]) - 1
