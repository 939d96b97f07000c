"""Converts the tokens of one sequence to text: detokenization, stop strings, finish reason."""

from __future__ import annotations

import json
from codecs import utf_8_decode
from dataclasses import dataclass
from itertools import chain, product
from operator import attrgetter
from string import hexdigits
from typing import TYPE_CHECKING, Self

import msgspec

from pagedray.batch import TokenLogprobs
from pagedray.errors import CheckpointError, InvalidRequestError, LethalRequestError, PagedRayError
from pagedray.request import FinishReason, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import tokenizers

    from cluster.scheduling.event import TokenEvent

__all__ = [
    "IncrementalDetokenizer",
    "SequenceOutput",
    "StopMatcher",
    "StopStrings",
    "TextStream",
    "TokenBytes",
    "overlap",
]

_token_ids_of = attrgetter("token_ids")
_logprobs_of = attrgetter("logprobs")

_SUPPORTED = "ByteLevel, Metaspace, or Replace, ByteFallback, Fuse and Strip"


# An output is created for every token; gc=False is safe, because no reference cycle has it.
class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The new tokens of one sequence since its last output."""

    prompt_index: int = 0
    """Index of the prompt in its call."""
    index: int
    """Index of the sequence in its prompt."""
    text: str
    """The new text, of complete characters only; it may lag behind the tokens."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of each token; empty if they are not requested."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string, or the client's stop token, that ended it."""
    error: str = ""
    """The reason if the client's structure ended the sequence with an error; otherwise empty."""
    is_lethal: bool = False
    """Whether it ended with an error because the ranks die whenever its request runs."""

    @property
    def failure(self) -> PagedRayError | None:
        """The error that ended it, if any."""
        if self.finish_reason is not FinishReason.ERROR:
            return None
        if self.is_lethal:
            return LethalRequestError()
        if self.error:
            return InvalidRequestError(f"The output cannot follow its structure: {self.error}.")
        return PagedRayError("The engine could not compute the next token.")


class _OutputDraft:
    """The text and tokens of an output to which events are being added."""

    __slots__ = ("logprobs", "pieces", "token_ids")

    def __init__(self) -> None:
        self.pieces: list[str] = []
        """The text in parts."""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []

    def add_tokens(self, event: TokenEvent, num_tokens: int) -> None:
        """Add the first tokens of an event, without their text."""
        self.token_ids += event.token_ids[:num_tokens]
        self.logprobs += event.logprobs[:num_tokens]


class TextStream:
    """Converts the events of one sequence to outputs."""

    def __init__(
        self,
        request: Request,
        index: int,
        token_bytes: TokenBytes,
        *,
        stops: StopStrings,
        prompt_index: int = 0,
        skips_special_tokens: bool = True,
        includes_stop: bool = False,
    ) -> None:
        """`stops` belong to the request, shared by all sequences of its call.

        `includes_stop` keeps the stop string or the client's stop token in the text.
        """
        sampling = request.sampling
        self._detokenizer = IncrementalDetokenizer.after(
            request.prompt_token_ids, token_bytes, skips_special_tokens=skips_special_tokens
        )
        self._includes_stop = includes_stop
        self._matcher = StopMatcher(stops)
        self._has_stops = bool(sampling.stop)
        self._min_tokens = sampling.min_tokens
        # It is searched rarely, so that making a set would take longer.
        self._client_stop_ids = sampling.stop_token_ids
        self._index = index
        self.prompt_index = prompt_index
        """Index of the prompt in its call."""
        self._num_tokens = 0
        self.is_finished = False
        """Whether its last output has been returned."""

    def add_events(self, events: Sequence[TokenEvent]) -> SequenceOutput:
        """Return the output of the next events."""
        assert not self.is_finished
        # Nothing follows the event that ends the sequence.
        *before, last = events
        if self._has_stops or (last.finish_reason is not None and not before):
            return self._add_one_by_one(events)
        if last.finish_reason is None:
            return self._add_at_once(events)
        first, ended = self._add_at_once(before), self._add_one_by_one([last])
        return msgspec.structs.replace(
            ended,
            text=first.text + ended.text,
            token_ids=first.token_ids + ended.token_ids,
            logprobs=first.logprobs + ended.logprobs,
        )

    def _add_at_once(self, events: Sequence[TokenEvent]) -> SequenceOutput:
        """Return the output of events of which none can end the sequence."""
        event = events[0]
        token_ids, logprobs = event.token_ids, event.logprobs
        if len(events) > 1:
            token_ids = tuple(chain.from_iterable(map(_token_ids_of, events)))
            logprobs = tuple(chain.from_iterable(map(_logprobs_of, events)))
        return SequenceOutput(
            prompt_index=self.prompt_index,
            index=self._index,
            text=self._detokenizer.add_tokens(token_ids),
            token_ids=token_ids,
            logprobs=logprobs,
        )

    def _add_one_by_one(self, events: Sequence[TokenEvent]) -> SequenceOutput:
        """Return the output of events, one of which may end the sequence."""
        draft = _OutputDraft()
        for event in events:
            stop = self._push_tokens(event, draft)
            if stop is not None:
                return self._output(draft, FinishReason.STOP, stop)
            if event.finish_reason is not None:
                return self._end(event, draft)
        return self._output(draft, None, None)

    def _push_tokens(self, event: TokenEvent, draft: _OutputDraft) -> str | None:
        """Add the tokens of an event with their text, up to a stop string, which is returned."""
        # The stop token is not part of the text, unless the client requested it.
        is_included = self._includes_stop and event.stop_token_id in self._client_stop_ids
        num_hidden = 0 if event.stop_token_id is None or is_included else 1
        for position, token_id in enumerate(event.token_ids[: len(event.token_ids) - num_hidden]):
            self._num_tokens += 1
            stop = self._push_text(self._detokenizer.add_tokens((token_id,)), draft)
            if stop is not None:
                draft.add_tokens(event, position + 1)
                return stop
        self._num_tokens += num_hidden
        draft.add_tokens(event, len(event.token_ids))
        return None

    def _push_text(self, text: str, draft: _OutputDraft) -> str | None:
        """Add text up to a stop string, which is returned."""
        if self._num_tokens <= self._min_tokens:
            draft.pieces.append(text)
            return None
        certain, stop = self._matcher.match_text(text)
        draft.pieces.append(certain)
        if stop is not None and self._includes_stop:
            draft.pieces.append(stop)
        return stop

    def _end(self, event: TokenEvent, draft: _OutputDraft) -> SequenceOutput:
        """Return the last output, with the text that was held back."""
        stop = self._push_text(self._detokenizer.flush(), draft)
        if stop is not None:
            return self._output(draft, FinishReason.STOP, stop)
        draft.pieces.append(self._matcher.flush())
        stop_id = event.stop_token_id
        named = stop_id if stop_id in self._client_stop_ids else None
        output = self._output(draft, event.finish_reason, named)
        if event.finish_reason is not FinishReason.ERROR:
            return output
        return msgspec.structs.replace(output, error=event.error, is_lethal=event.is_lethal)

    def _output(
        self, draft: _OutputDraft, finish_reason: FinishReason | None, stop_reason: str | int | None
    ) -> SequenceOutput:
        self.is_finished = finish_reason is not None
        return SequenceOutput(
            prompt_index=self.prompt_index,
            index=self._index,
            text="".join(draft.pieces),
            token_ids=tuple(draft.token_ids),
            logprobs=tuple(draft.logprobs),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )


class StopStrings:
    """The stop strings of a call, shared by the matchers of all its sequences."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple((stop, _fallbacks(stop)) for stop in dict.fromkeys(stops))
        """Each with the fallbacks of Knuth, Morris and Pratt's search."""
        self.first_characters = frozenset(stop[0] for stop, _ in self.stops)


class StopMatcher:
    """Cuts a text before the first stop string.

    The result does not depend on the pieces. Of stop strings that end at the same character, the
    longest is found.
    """

    __slots__ = ("_depths", "_held", "_stops")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._depths = [0] * len(stops.stops)
        """How many characters at the end of the text so far begin each stop string."""
        self._held = ""

    def match_text(self, text: str) -> tuple[str, str | None]:
        """Return the text before a stop string, and the stop string if found.

        A suffix that may begin a stop string is held back.
        """
        if not self._held and self._stops.first_characters.isdisjoint(text):
            # The fast path of most tokens.
            return text, None
        for position, character in enumerate(text):
            found = self._add_character(character)
            if found is not None:
                return (self._held + text[: position + 1])[: -len(found)], found
        seen = self._held + text
        num_certain = len(seen) - max(self._depths, default=0)
        self._held = seen[num_certain:]
        return seen[:num_certain], None

    def flush(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held

    def _add_character(self, character: str) -> str | None:
        """Return the longest stop string that ends with a character, if any."""
        longest: str | None = None
        depths = self._depths
        for number, (stop, fallbacks) in enumerate(self._stops.stops):
            depth = depths[number]
            while depth and stop[depth] != character:
                depth = fallbacks[depth - 1]
            if stop[depth] == character:
                depth += 1
            depths[number] = depth
            if depth == len(stop) and (longest is None or depth > len(longest)):
                longest = stop
        return longest


def _fallbacks(stop: str) -> list[int]:
    """Return how many characters at the end of each prefix of a text also begin the text."""
    lengths = [0]
    length = 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = lengths[length - 1]
        if stop[length] == character:
            length += 1
        lengths.append(length)
    return lengths


class IncrementalDetokenizer:
    """Returns the text of one sequence in pieces that never split a character.

    Together the pieces equal the tokenizer's text of the whole list.
    """

    def __init__(
        self, token_bytes: TokenBytes, *, is_continuation: bool, skips_special_tokens: bool = True
    ) -> None:
        """With `is_continuation`, other text precedes, so that a leading space is kept."""
        by_id = token_bytes.ordinary_by_id if skips_special_tokens else token_bytes.by_id
        # Called by `map`, which costs no Python code for each token.
        self._bytes_of = by_id.__getitem__
        self._fallback_ids = token_bytes.fallback_ids
        self._run = bytearray()
        self._held = b""
        self._num_stripped = 0 if is_continuation else token_bytes.num_stripped

    @classmethod
    def after(
        cls, prompt: Sequence[int], token_bytes: TokenBytes, *, skips_special_tokens: bool
    ) -> Self:
        """Return a detokenizer of the tokens after a prompt."""
        # Only decoders that strip leading spaces depend on the text before.
        is_continuation = token_bytes.num_stripped > 0 and not all(
            map(token_bytes.is_special, prompt)
        )
        return cls(
            token_bytes, is_continuation=is_continuation, skips_special_tokens=skips_special_tokens
        )

    def add_tokens(self, token_ids: Sequence[int]) -> str:
        """Return the complete characters up to these tokens that were not returned before."""
        if self._run or not self._fallback_ids.isdisjoint(token_ids):
            return "".join(map(self._add_beside_run, token_ids))
        # The fast path of most tokens.
        return self._decoded(b"".join(map(self._bytes_of, token_ids)))

    def flush(self) -> str:
        """Return the rest of the text: U+FFFD if a character is incomplete."""
        text = self._decoded(self._ended_run())
        held, self._held = self._held, b""
        return text + held.decode(errors="replace")

    def _add_beside_run(self, token_id: int) -> str:
        own = self._bytes_of(token_id)
        if not own:
            return ""
        if token_id in self._fallback_ids:
            # Consecutive bytes are decoded together, so that no text is certain before their end.
            self._run += own
            return ""
        return self._decoded(self._ended_run() + own)

    def _decoded(self, data: bytes) -> str:
        known = self._held + data
        text, num_taken = utf_8_decode(known, "replace", False)
        # The bytes of an incomplete character.
        self._held = known[num_taken:]
        return self._stripped(text) if self._num_stripped else text

    def _ended_run(self) -> bytes:
        """Return the text of the consecutive bytes that have ended, as UTF-8."""
        if not self._run:
            return b""
        run, self._run = bytes(self._run), bytearray()
        try:
            run.decode()
        except UnicodeDecodeError:
            return len(run) * "\ufffd".encode()
        return run

    def _stripped(self, text: str) -> str:
        while self._num_stripped and text:
            if not text.startswith(" "):
                self._num_stripped = 0
            else:
                text = text[1:]
                self._num_stripped -= 1
        return text


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `mark`."""
    place = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while place >= 0:
        if mark.startswith(text[place:]):
            return len(text) - place
        place = text.find(mark[0], place + 1)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """The operations of a decoder."""

    is_byte_level: bool = False
    has_byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    num_stripped: int = 0
    """Spaces stripped from the start of a text."""


class TokenBytes:
    """The bytes of a tokenizer's tokens, cached."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Raises CheckpointError for a decoder that is not supported."""
        self._tokenizer = tokenizer
        self._rules = _read_rules(tokenizer)
        self._special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self._fallback_bytes = _fallback_bytes(tokenizer) if self._rules.has_byte_fallback else {}
        self.fallback_ids = frozenset(self._fallback_bytes)
        """The tokens that stand for a byte of a character.

        Each of several consecutive tokens that are not valid UTF-8 becomes U+FFFD.
        """
        self.by_id = _BytesById(self._read)
        """The bytes of each token; empty for an id without a token."""
        self.ordinary_by_id = _BytesById(self._read_ordinary)
        """The bytes of each token that is not special; empty for special tokens."""

    @property
    def num_stripped(self) -> int:
        """Spaces that the decoder strips from the start of a text."""
        return self._rules.num_stripped

    def is_special(self, token_id: int) -> bool:
        """Return whether the token is special, such as an end-of-sequence token."""
        return token_id in self._special_ids

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty for an id without a token."""
        return self.by_id[token_id]

    def text_of(self, token_id: int) -> str:
        """Return the token as text, with U+FFFD for incomplete characters."""
        return self.bytes_of(token_id).decode(errors="replace")

    def _read_ordinary(self, token_id: int) -> bytes:
        return b"" if self.is_special(token_id) else self.by_id[token_id]

    def _read(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._rules.is_byte_level:
            try:
                return bytes(_BYTE_OF[character] for character in token)
            except KeyError:
                # Added tokens are plain text.
                return token.encode()
        if (byte := self._fallback_bytes.get(token_id)) is not None:
            return bytes((byte,))
        for old, new in self._rules.replacements:
            token = token.replace(old, new)
        return token.encode()


class _BytesById(dict[int, bytes]):
    """The bytes of tokens, each read when it is first looked up."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._read(token_id)
        return found


def _read_rules(tokenizer: tokenizers.Tokenizer) -> _Rules:
    decoder = tokenizer.decoder
    tree = None if decoder is None else json.loads(decoder.__getstate__())
    steps = _flattened(tree)
    kinds = [str(step["type"]) for step in steps]
    if kinds == ["ByteLevel"]:
        return _Rules(is_byte_level=True)
    replacements: list[tuple[str, str]] = []
    num_stripped = 0
    for kind, step in zip(kinds, steps, strict=True):
        match kind, step:
            case "Replace", {"pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case "Metaspace", {"replacement": str(old)}:
                replacements.append((old, " "))
                num_stripped = 0 if step.get("prepend_scheme") == "never" else 1
            case "Strip", {"content": " ", "start": int(start), "stop": 0}:
                num_stripped = start
            case "ByteFallback" | "Fuse", _:
                pass
            case _:
                raise _unsupported(kind)
    if not steps:
        raise _unsupported("none")
    return _Rules(
        has_byte_fallback="ByteFallback" in kinds,
        replacements=tuple(replacements),
        num_stripped=num_stripped,
    )


def _fallback_bytes(tokenizer: tokenizers.Tokenizer) -> dict[int, int]:
    digits = ["".join(pair) for pair in product(hexdigits, repeat=2)]
    ids = [tokenizer.token_to_id(f"<0x{pair}>") for pair in digits]
    return {
        token_id: int(pair, 16)
        for token_id, pair in zip(ids, digits, strict=True)
        if token_id is not None
    }


def _flattened(tree: object) -> list[dict[str, object]]:
    if not isinstance(tree, dict):
        return []
    if tree.get("type") != "Sequence":
        return [tree]
    return [step for part in tree["decoders"] for step in _flattened(part)]


def _unsupported(kind: str) -> CheckpointError:
    return CheckpointError(
        f"Unsupported decoder {kind} in tokenizer.json; supported decoders are {_SUPPORTED}."
    )


def _byte_alphabet() -> dict[str, int]:
    # The byte alphabet of GPT-2: printable Latin-1 bytes are themselves, and the others, in order,
    # the characters from U+0100 on.
    alphabet: dict[str, int] = {}
    num_shifted = 0
    for byte in range(256):
        is_plain = 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE
        alphabet[chr(byte if is_plain else 0x100 + num_shifted)] = byte
        num_shifted += not is_plain
    return alphabet


_BYTE_OF = _byte_alphabet()
