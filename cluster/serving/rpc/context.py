"""The context of a gRPC call: its metadata, and its end with an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from cluster.serving.rpc.status import DETAILS_KEY, code_of, status_of

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Context", "abort_call", "drop_frames", "metadata_of"]

# grpc's own stubs leave the context's message types open.
Context = grpc.aio.ServicerContext[Any, Any]


def metadata_of(entries: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """Return the text entries of a call's metadata; values of one key are joined."""
    metadata: dict[str, str] = {}
    for key, value in entries or ():
        if isinstance(value, str):
            # As in HTTP. Two API keys then form an invalid key.
            metadata[key] = f"{metadata[key]}, {value}" if key in metadata else value
    return metadata


async def abort_call(context: Context, error: Exception) -> NoReturn:
    """End a call with the status and details of an error."""
    if isinstance(error, grpc.aio.AbortError | grpc.aio.BaseError | grpc.RpcError):
        raise error
    status = status_of(error)
    drop_frames(error)
    await context.abort(
        code_of(status), status.message, ((DETAILS_KEY, status.SerializeToString()),)
    )
    raise AssertionError("abort raises an error")


def drop_frames(error: BaseException) -> None:
    """Free the variables in the frames of an error and of its causes.

    gRPC keeps the error of an aborted call in a reference cycle, so the call's message would stay
    in memory until a garbage collection.
    """
    waiting: BaseException | None = error
    while waiting is not None:
        waiting.__traceback__ = None
        waiting = waiting.__context__
