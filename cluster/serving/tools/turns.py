"""The turns of a call: reasoning, content and tool calls of its sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.serving.reasoning import ReasoningReader
from cluster.serving.tools.channel_reader import ChannelTokens
from cluster.serving.tools.turn_reader import TurnDelta
from pagedray.request import FinishReason, ReasoningPlace, ReasoningTracker

if TYPE_CHECKING:
    from cluster.serving.text.text_stream import SequenceOutput, TokenBytes
    from cluster.serving.tools.tool_choice import ToolUse
    from cluster.serving.tools.turn_reader import TurnReader
    from pagedray.request import Reasoning

__all__ = ["Turn", "Turns"]


class Turns:
    """Makes the readers of a call's turns."""

    def __init__(
        self,
        tools: ToolUse,
        reasoning: Reasoning | None = None,
        token_bytes: TokenBytes | None = None,
        *,
        shows_reasoning: bool = True,
    ) -> None:
        """A model that reasons needs `token_bytes`.

        Without `shows_reasoning` it is left out of the turns.
        """
        self.tools = tools
        self._reasoning = reasoning
        self._token_bytes = token_bytes
        self._shows_reasoning = shows_reasoning
        self._turns: list[Turn] = []
        self.has_reasoning = reasoning is not None
        """Whether the model may reason."""
        self.are_read = self.has_reasoning or tools.is_read
        """Whether turns contain anything but text as it is."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning of all turns so far, with its marks."""
        return sum(turn.num_reasoning_tokens for turn in self._turns)

    def begin_turn(self) -> Turn:
        """Return the reader of another turn."""
        turn = Turn(
            self.tools, self._reasoning, self._token_bytes, shows_reasoning=self._shows_reasoning
        )
        self._turns.append(turn)
        return turn


class Turn:
    """Reads the outputs of one sequence."""

    def __init__(
        self,
        tools: ToolUse,
        reasoning: Reasoning | None,
        token_bytes: TokenBytes | None,
        *,
        shows_reasoning: bool,
    ) -> None:
        self.num_reasoning_tokens = 0
        """Tokens of the reasoning so far, with its marks."""
        self._calls: TurnReader | None = None
        self._reasoning = None
        self._channels: ChannelTokens | None = None
        self._tracker: ReasoningTracker | None = None
        if reasoning is not None and reasoning.has_channels:
            reader = self._calls = tools.channel_reader(is_open=reasoning.is_open)
            self._channels = ChannelTokens(reader.tool_names, is_open=reasoning.is_open)
        else:
            self._calls = tools.reader() if tools.is_read else None
            if reasoning is not None:
                self._reasoning = ReasoningReader(reasoning)
                self._tracker = ReasoningTracker(reasoning)
        self._token_bytes = token_bytes
        self._shows_reasoning = shows_reasoning

    @property
    def has_calls(self) -> bool:
        """Whether a tool call has begun."""
        return self._calls is not None and self._calls.num_calls > 0

    @property
    def is_plain(self) -> bool:
        """Whether all text that follows is content as it is."""
        return self._calls is None and (self._reasoning is None or self._reasoning.is_passed)

    def read(self, output: SequenceOutput) -> TurnDelta:
        """Return the progress of the turn by an output; at the end, also all text held back."""
        is_last = output.finish_reason is not None
        if self._channels is not None:
            self._count_in_channels(output.token_ids, self._channels)
        elif self._tracker is not None:
            self._count(output.token_ids, self._tracker, is_last=is_last)
        reasoning, text = "", output.text
        if self._reasoning is not None:
            reasoning, text = self._reasoning.read_piece(text, is_last=is_last)
        if self._calls is None:
            read = TurnDelta(reasoning=reasoning, content=text)
        else:
            read = TurnDelta(reasoning=reasoning)
            read.add_delta(self._calls.read_piece(text))
            if is_last:
                is_cut_off = output.finish_reason is not FinishReason.STOP
                read.add_delta(self._calls.flush(is_cut_off=is_cut_off))
        if not self._shows_reasoning:
            read.drop_reasoning()
        return read

    def _count_in_channels(self, token_ids: tuple[int, ...], channels: ChannelTokens) -> None:
        assert self._token_bytes is not None
        for token_id in token_ids:
            channels.add_token(self._token_bytes.bytes_of(token_id))
        self.num_reasoning_tokens = channels.num_reasoning

    def _count(
        self, token_ids: tuple[int, ...], tracker: ReasoningTracker, *, is_last: bool
    ) -> None:
        """Count tokens until it is certain that no more of them are reasoning."""
        for token_id in token_ids:
            if tracker.is_passed:
                break
            assert self._token_bytes is not None
            tracker.add_token(token_id, self._token_bytes.bytes_of(token_id))
            self.num_reasoning_tokens += 1
        if tracker.place is ReasoningPlace.ABSENT or (
            is_last and tracker.place is ReasoningPlace.START
        ):
            self.num_reasoning_tokens = 0
        if tracker.is_passed:
            self._tracker = None
