"""Parses protobuf requests and translates them to the servicer's inputs.

Fields are counted before parsing, which makes an object of each. Values are validated later.
"""

from __future__ import annotations

import json
import struct
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from cluster.serving.beam_search import check_beam_sampling, check_length_penalty
from cluster.serving.embedding_validator import MAX_PAIRS, MAX_PROMPTS
from cluster.serving.inputs import (
    MAX_TIMEOUT_S,
    EmbeddingInput,
    GenerationInput,
    InfillPrompt,
    Prompt,
    ScoreInput,
    TokenizeInput,
)
from pagedray.errors import ContextLengthError, InvalidRequestError, invalid_field
from pagedray.field_checks import check_size
from pagedray.sampling_params import (
    MAX_ALLOWED,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP,
    Structure,
)
from pagedray.v1 import pagedray_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.descriptor import Descriptor
    from google.protobuf.duration_pb2 import Duration

    from cluster.serving.auth import Tenant
    from cluster.serving.intake import RequestSize
    from cluster.serving.rpc.call import RpcCall
    from cluster.serving.text.template_arguments import ChatPrompt
    from pagedray.batch import Pooling

__all__ = [
    "check_fields",
    "check_message_size",
    "check_resume",
    "generation_input",
    "max_received_bytes",
    "parse",
    "read_embedding",
    "read_generation",
    "read_score",
    "tokenize_input",
]

_MAX_CHOICES = 1024
_MOST_NAMED_BYTES = 1024
"""Unknown fields of up to this size are searched for the first field, to name it in the error."""
_MAX_ENTRIES = {
    "stop": MAX_STOP,
    "stop_token_ids": MAX_LOGIT_BIAS,
    "allowed_token_ids": MAX_ALLOWED,
    "logprob_token_ids": MAX_LOGPROBS,
    "bad_words": MAX_BAD_WORDS,
}
# Fields of SamplingParams that are fields of GenerationInput.
_TEXT_FIELDS = ("skip_special_tokens", "include_stop")
_BEAMS = "beam_search"
_RESUME_FIELDS = frozenset(("request_id", "resume_from"))
_FLOAT = struct.Struct("<f")
_POOLINGS: dict[int, Pooling | None] = {
    pb.POOLING_UNSPECIFIED: None,
    pb.POOLING_MEAN: "mean",
    pb.POOLING_CLS: "cls",
    pb.POOLING_LAST: "last",
}
_Truncated: TypeAlias = pb.GenerateRequest | pb.ChatRequest | pb.EmbedRequest
"""A message with prompts that may be truncated."""
Incoming = TypeVar("Incoming", bound=Message)

_MAX_FIELDS = 3 * 2**13
_FEW_BYTES = 2**12
"""A message of this size has few fields in any case."""
_VARINT, _FIXED64, _DELIMITED, _GROUP, _GROUP_END, _FIXED32 = range(6)
_CONTINUED = bytes(range(128, 256))


def parse(kind: type[Incoming], body: bytes, size: RequestSize) -> Incoming:
    """Return the parsed message. Raises InvalidRequestError."""
    check_message_size(body, size.num_bytes)
    check_fields(kind, body, size)
    try:
        message = kind.FromString(body)
    except DecodeError as error:
        raise InvalidRequestError(f"The message is not a valid {kind.__name__}.") from error
    _check_known_fields(message, body)
    return message


def read_generation(message: pb.GenerateRequest, call: RpcCall, tenant: Tenant) -> GenerationInput:
    """Return the input of a Generate request. Raises InvalidRequestError."""
    prompt: Prompt = _read_prompt(message)
    if message.suffix:
        if message.WhichOneof("prompt") != "text":
            raise invalid_field("suffix", "requires text.")
        if message.HasField("truncate_prompt_tokens"):
            raise invalid_field("suffix", "cannot be combined with truncate_prompt_tokens.")
        prompt = InfillPrompt(message.text, message.suffix)
    given = generation_input(prompt, message, call, tenant)
    return replace(given, adds_special_tokens=_or_true(message, "add_special_tokens"))


def generation_input(
    prompt: Prompt, message: pb.GenerateRequest | pb.ChatRequest, call: RpcCall, tenant: Tenant
) -> GenerationInput:
    """Return the input that continues `prompt`. Raises InvalidRequestError."""
    sampling = message.sampling
    given = _read_sampling(sampling)
    return GenerationInput(
        prompts=(prompt,),
        sampling=given,
        model=message.model or None,
        client_id=message.request_id or None,
        priority=message.priority,
        deadline_s=_deadline_s(message, call),
        tenant=tenant.name,
        cache_salt=message.cache_salt,
        skips_special_tokens=_or_true(sampling, "skip_special_tokens"),
        includes_stop=sampling.include_stop,
        max_prompt_tokens=_max_prompt_tokens(message),
        truncates_end=_truncates_end(message, default=False),
        beam_length_penalty=_read_beams(sampling, given),
        is_resumable=message.resumable,
        origin=call.origin,
        continuation=call.continuation,
    )


def read_embedding(message: pb.EmbedRequest, call: RpcCall, tenant: Tenant) -> EmbeddingInput:
    """Return the input of an Embed request. Raises InvalidRequestError."""
    check_size("prompts", len(message.prompts), MAX_PROMPTS)
    if message.pooling not in _POOLINGS:
        raise invalid_field("pooling", f"has unknown enum value {message.pooling}.")
    return EmbeddingInput(
        prompts=tuple(_read_prompt(prompt) for prompt in message.prompts),
        pooling=_POOLINGS[message.pooling],
        is_normalized=_or_true(message, "normalize"),
        prompt_name=message.prompt_name if message.HasField("prompt_name") else None,
        dimensions=message.dimensions if message.HasField("dimensions") else None,
        max_prompt_tokens=_max_prompt_tokens(message),
        truncates_end=_truncates_end(message, default=True),
        model=message.model or None,
        deadline_s=_deadline_s(message, call),
        tenant=tenant.name,
        origin=call.origin,
    )


def read_score(message: pb.ScoreRequest, call: RpcCall, tenant: Tenant) -> ScoreInput:
    """Return the input of a Score request. Raises InvalidRequestError."""
    check_size("documents", len(message.documents), MAX_PAIRS)
    return ScoreInput(
        pairs=tuple((message.query, document) for document in message.documents),
        params=("query", "documents"),
        instruction=message.instruction if message.HasField("instruction") else None,
        model=message.model or None,
        deadline_s=_deadline_s(message, call),
        tenant=tenant.name,
        origin=call.origin,
    )


def tokenize_input(
    prompt: str | ChatPrompt, message: pb.TokenizeRequest, tenant: Tenant
) -> TokenizeInput:
    """Return the input of a Tokenize request, given its prompt."""
    return TokenizeInput(
        prompt=prompt,
        add_special_tokens=_or_true(message, "add_special_tokens"),
        model=message.model or None,
        tenant=tenant.name,
    )


def check_resume(message: pb.GenerateRequest | pb.ChatRequest) -> None:
    """Raise InvalidRequestError if a request that resumes a stream has other fields."""
    if not message.request_id:
        raise InvalidRequestError(
            "resume_from requires the request_id of the stream.", param="request_id"
        )
    for field, _ in message.ListFields():
        if field.name not in _RESUME_FIELDS:
            raise invalid_field(field.name, "cannot be combined with resume_from.")


def _check_known_fields(message: Message, body: bytes) -> None:
    """Raise InvalidRequestError for a message with unknown fields."""
    # Reading unknown fields costs a microsecond each, and a body has room for two million.
    num_bytes = message.ByteSize()
    message.DiscardUnknownFields()
    num_unknown_bytes = num_bytes - message.ByteSize()
    if num_unknown_bytes == 0:
        return
    kind = type(message)
    if num_unknown_bytes > _MOST_NAMED_BYTES:
        raise InvalidRequestError(
            f"{kind.__name__} has {num_unknown_bytes} bytes of unknown fields."
        )
    _reject_unknown_field(kind.FromString(body))


def _reject_unknown_field(message: Message) -> None:
    """Raise InvalidRequestError with the number of the first unknown field."""
    unknown = UnknownFieldSet(message)
    if len(unknown) > 0:
        raise unknown_field(type(message).__name__, unknown[0].field_number)
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None or descriptor.message_type.GetOptions().map_entry:
            continue
        for nested in value if descriptor.is_repeated else (value,):
            _reject_unknown_field(nested)


def _max_prompt_tokens(message: _Truncated) -> int | None:
    is_set = message.HasField("truncate_prompt_tokens")
    return message.truncate_prompt_tokens if is_set else None


def _truncates_end(message: _Truncated, *, default: bool) -> bool:
    if message.truncation_side not in pb.TruncationSide.values():
        raise invalid_field("truncation_side", f"has unknown enum value {message.truncation_side}.")
    if message.truncation_side == pb.TRUNCATION_SIDE_UNSPECIFIED:
        return default
    return message.truncation_side == pb.TRUNCATION_SIDE_RIGHT


def _deadline_s(
    message: pb.GenerateRequest | pb.ChatRequest | pb.EmbedRequest | pb.ScoreRequest, call: RpcCall
) -> float | None:
    limits_s = [] if call.remaining_s is None else [call.remaining_s]
    if message.HasField("timeout"):
        limits_s.append(_timeout_s(message.timeout))
    return time.monotonic() + min(limits_s) if limits_s else None


def _timeout_s(timeout: Duration) -> float:
    timeout_s = timeout.seconds + timeout.nanos / 1e9
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise invalid_field(
            "timeout", f"must be in (0, {MAX_TIMEOUT_S}] seconds, not {timeout_s:g}."
        )
    return timeout_s


def _or_true(message: Message, name: str) -> bool:
    return not message.HasField(name) or bool(getattr(message, name))


def _read_prompt(message: pb.GenerateRequest | pb.EmbedPrompt) -> str | tuple[int, ...]:
    if message.WhichOneof("prompt") == "token_ids":
        return tuple(message.token_ids.ids)
    return message.text


def _read_sampling(message: pb.SamplingParams) -> dict[str, object]:
    given: dict[str, object] = {}
    for descriptor, value in message.ListFields():
        name = descriptor.name
        if name in _TEXT_FIELDS or name == _BEAMS:
            continue
        if name == "structure":
            given[name] = _read_structure(value)
        elif name == "logit_bias":
            check_size(name, len(value), MAX_LOGIT_BIAS)
            given[name] = {token_id: _decimal(bias) for token_id, bias in value.items()}
        elif isinstance(value, bool | int):
            given[name] = value
        elif isinstance(value, float):
            given[name] = _decimal(value)
        else:
            check_size(name, len(value), _MAX_ENTRIES[name])
            given[name] = tuple(value)
    return given


def _read_beams(message: pb.SamplingParams, given: dict[str, object]) -> float | None:
    """Return the length penalty of a beam search; None if the output is sampled."""
    if not message.HasField(_BEAMS):
        return None
    check_beam_sampling(given, _BEAMS)
    beams = message.beam_search
    if not beams.HasField("length_penalty"):
        return 1.0
    return check_length_penalty(_decimal(beams.length_penalty), "length_penalty")


def _read_structure(message: pb.Structure) -> Structure:
    kind = message.WhichOneof("kind")
    if kind is None or (kind == "json_object" and not message.json_object):
        raise InvalidRequestError("One of the kinds of structure must be set.", param="structure")
    if kind == "json_object":
        return Structure(kind=kind)
    if kind == "choices":
        check_size("structure", len(message.choices.texts), _MAX_CHOICES)
        return Structure(kind="choice", text=json.dumps(list(message.choices.texts)))
    return Structure(kind=kind, text=getattr(message, kind))


def _decimal(value: float) -> float:
    """Return the shortest decimal that rounds to this 32-bit float, so that 0.7 means 0.7."""
    for num_digits in range(6, 9):
        candidate = float(f"{value:.{num_digits}g}")
        if abs(candidate) < 3e38 and _FLOAT.unpack(_FLOAT.pack(candidate))[0] == value:
            return candidate
    return value


def max_received_bytes(max_bytes: int) -> int:
    """Return the size of messages that gRPC receives if they may have `max_bytes`.

    A message between the two limits is received and rejected with error details. gRPC itself
    rejects a longer message by its length, before it is received, without details. A call may hold
    this much memory, so the limit is close to the other limit.
    """
    return max_bytes + max_bytes // 2


def check_message_size(body: bytes, max_bytes: int) -> None:
    """Raise InvalidRequestError for a message that is too large to parse."""
    if len(body) > max_bytes:
        raise InvalidRequestError(
            f"Message of {len(body)} bytes is larger than the limit of {max_bytes} bytes "
            "(--max-request-kib).",
            param="message",
        )


def check_fields(kind: type[Message], body: bytes, size: RequestSize) -> None:
    """Raise InvalidRequestError for too many fields, or too many token ids in a field.

    An invalid message is left to the parser.
    """
    if len(body) <= _FEW_BYTES:
        return
    walk = _Walk(body, size)
    walk.count(kind.DESCRIPTOR, 0, len(body))  # type: ignore[arg-type]  # upb's is alike


def unknown_field(kind: str, number: int) -> InvalidRequestError:
    """Return the error of a message of a kind that has no field with a number."""
    return InvalidRequestError(f"{kind} has no field with number {number}.")


class _Walk:
    """One pass over a message and the messages nested in it."""

    def __init__(self, body: bytes, size: RequestSize) -> None:
        self._body = body
        self._size = size
        self._num_fields = 0
        self._outer = ""
        """The name of the field of the outermost message."""

    def count(self, kind: Descriptor, at: int, end: int, *, is_outer: bool = True) -> None:
        """Count the fields of a message between two offsets."""
        for name, nested, start, stop in self._fields(kind, at, end):
            if is_outer:
                self._outer = name
            if nested is not None:
                self.count(nested, start, stop, is_outer=False)
            elif stop > start:
                self._check_list(name, start, stop)

    def _fields(
        self, kind: Descriptor, at: int, end: int
    ) -> Iterator[tuple[str, Descriptor | None, int, int]]:
        """Yield the name of each field, and where its nested message or its packed list is."""
        body = self._body
        fields = kind.fields_by_number
        while at < end:
            self._num_fields += 1
            if self._num_fields > _MAX_FIELDS:
                self._reject()
            tag = body[at]
            at += 1
            if tag > 127:
                tag, at = _varint(body, at - 1, end)
            wire = tag & 7
            if wire in (_GROUP, _GROUP_END):
                # No message has groups, so the parser would skip a group and parse the rest.
                raise unknown_field(kind.name, tag >> 3)
            field = fields.get(tag >> 3)
            name = "" if field is None else field.name
            if wire == _DELIMITED:
                num_bytes, at = _varint(body, at, end)
                stop = min(at + num_bytes, end)
                if field is not None and field.message_type is not None:
                    yield name, field.message_type, at, stop
                elif field is not None and field.is_packed:
                    yield name, None, at, stop
                else:
                    yield name, None, at, at
                at = stop
                continue
            yield name, None, at, at
            if wire == _VARINT:
                _, at = _varint(body, at, end)
            elif wire == _FIXED32:
                at += 4
            elif wire == _FIXED64:
                at += 8
            else:
                return

    def _reject(self) -> NoReturn:
        raise InvalidRequestError(
            f"{self._outer or 'The message'} has too many entries: a message may have at most "
            f"{_MAX_FIELDS} fields, those of nested messages included.",
            param=self._outer or "message",
        )

    def _check_list(self, name: str, at: int, end: int) -> None:
        """Raise ContextLengthError for a list that no context of the model holds."""
        if end - at <= self._size.num_list_values:
            return
        # The last byte of each number has its highest bit clear.
        num_values = len(self._body[at:end].translate(None, _CONTINUED))
        if num_values > self._size.num_list_values:
            field = self._outer or name
            raise ContextLengthError(
                f"{field} has {num_values} entries, but the context length of {self._size.context} "
                f"(--max-model-len) allows at most {self._size.num_list_values}.",
                param=field,
            )


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the number at an offset, and the offset after it; `end` for an invalid number."""
    if at < end and body[at] < 128:
        # The fast path of most tags and lengths.
        return body[at], at + 1
    number = shift = 0
    while at < end and shift < 70:
        byte = body[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
        shift += 7
    return 0, end
