"""Translates the servicer's outputs to protobuf messages."""

from __future__ import annotations

from array import array
from dataclasses import fields
from typing import TYPE_CHECKING

from cluster.serving.server_info import CallInfo, ServerInfo, ServerLoads
from pagedray.request import FinishReason
from pagedray.v1 import pagedray_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.serving.generation_call import GenerationOutput
    from cluster.serving.text.text_stream import SequenceOutput
    from pagedray.batch import PromptLogprobs, TokenLogprobs

__all__ = [
    "finish_reason",
    "generate_response",
    "loads_response",
    "logprobs_of",
    "server_info_response",
    "stop_reason",
    "write_frame",
]

_FINISH_REASONS = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORTED,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_INFO_NAMES = tuple(field.name for field in fields(ServerInfo))
_LOAD_NAMES = tuple(field.name for field in fields(ServerLoads) if field.name != "calls")


def generate_response(
    request_id: str, output: GenerationOutput, *, is_first: bool
) -> pb.GenerateResponse:
    """Return the message of one output of Generate."""
    response = pb.GenerateResponse(request_id=request_id)
    for sequence in output.sequences:
        _add_sequence(response, sequence)
    write_frame(response, output, is_first=is_first)
    return response


def write_frame(
    response: pb.GenerateResponse | pb.ChatResponse, output: GenerationOutput, *, is_first: bool
) -> None:
    """Set the fields of the first and the last message of a stream, and the prompt's fields."""
    usage = output.usage
    if is_first or output.prompt_logprobs:
        response.prompt_info.num_prompt_tokens = usage.num_prompt_tokens
        response.prompt_info.num_cached_tokens = usage.num_cached_tokens
        if output.prompt_logprobs:
            _write_prompt_logprobs(response.prompt_info.prompt_logprobs, output.prompt_logprobs)
    if output.is_last:
        response.usage.num_prompt_tokens = usage.num_prompt_tokens
        response.usage.num_cached_tokens = usage.num_cached_tokens
        response.usage.num_generated_tokens = usage.num_generated_tokens


def finish_reason(output: SequenceOutput) -> pb.FinishReason:
    """Return the finish reason of a sequence."""
    return _FINISH_REASONS[output.finish_reason]


def stop_reason(output: SequenceOutput) -> str:
    """Return the token or text that stopped a sequence, or its failure; empty for other reasons."""
    if (failure := output.failure) is not None:
        return str(failure)
    return "" if output.stop_reason is None else str(output.stop_reason)


def logprobs_of(logprobs: Sequence[TokenLogprobs]) -> list[pb.TokenLogprobs]:
    """Return the messages of log-probabilities, a message for each token."""
    return [
        pb.TokenLogprobs(
            logprob=one.chosen,
            top_logprobs=[
                pb.TopLogprob(token_id=token_id, logprob=value)
                for token_id, value in zip(one.token_ids, one.logprobs, strict=True)
            ],
        )
        for one in logprobs
    ]


def server_info_response(info: ServerInfo) -> pb.GetServerInfoResponse:
    """Return the response of GetServerInfo."""
    return pb.GetServerInfoResponse(**{name: getattr(info, name) for name in _INFO_NAMES})


def loads_response(loads: ServerLoads) -> pb.GetLoadsResponse:
    """Return the response of GetLoads."""
    return pb.GetLoadsResponse(
        calls=[_call_load(call) for call in loads.calls],
        **{name: getattr(loads, name) for name in _LOAD_NAMES},
    )


def _write_prompt_logprobs(message: pb.PromptLogprobs, parts: Sequence[PromptLogprobs]) -> None:
    message.num_top_logprobs = parts[0].num_likeliest
    for part in parts:
        message.logprobs.extend(array("f", part.chosen))
        message.ranks.extend(array("i", part.ranks))
        message.top_token_ids.extend(array("i", part.token_ids))
        message.top_logprobs.extend(array("f", part.logprobs))


def _call_load(call: CallInfo) -> pb.CallLoad:
    return pb.CallLoad(
        request_id=call.id,
        age_s=call.age_s,
        num_prompt_tokens=call.num_prompt_tokens,
        num_generated_tokens=call.num_generated_tokens,
        tenant=call.tenant,
    )


def _add_sequence(response: pb.GenerateResponse, output: SequenceOutput) -> None:
    # Built in place: protobuf copies a message that is added to another.
    add = response.sequences.add
    if output.finish_reason is None and not output.logprobs:
        # The fast path of most tokens.
        add(index=output.index, text=output.text, token_ids=output.token_ids)
        return
    add(
        index=output.index,
        text=output.text,
        token_ids=output.token_ids,
        logprobs=logprobs_of(output.logprobs),
        finish_reason=finish_reason(output),
        stop_reason=stop_reason(output),
    )
