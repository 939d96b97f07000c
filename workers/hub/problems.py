"""Turns exceptions of huggingface_hub into one-line errors that say how to solve them."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from huggingface_hub import get_token
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from pagedray.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workers.hub.model_name import HubName, HubSettings

__all__ = ["HubUnreachableError", "hub_error"]

_ACCESS_ERRORS = {errno.EROFS, errno.EACCES, errno.EPERM}
_STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO} | _ACCESS_ERRORS
_MAX_REASON = 200


class HubUnreachableError(CheckpointError):
    """The Hub does not answer; cached files can be used."""

    def __init__(self, name: HubName, reason: str, advice: str) -> None:
        """`reason` describes the problem, without the name of the model."""
        super().__init__(f"{name} is not a folder, and cannot be downloaded: {reason}; {advice}.")
        self.reason = reason


def hub_error(error: BaseException, name: HubName, settings: HubSettings) -> CheckpointError:
    """Return the error to raise for an exception of the library."""
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, HfHubHTTPError):
            return _rejection(cause, name, settings.endpoint)
    for cause in causes:
        if isinstance(cause, OSError) and cause.errno in _STORAGE_ERRORS:
            advice = (
                "make it writable" if cause.errno in _ACCESS_ERRORS else "free some space there"
            )
            return CheckpointError(
                f"{name} cannot be stored in {settings.cache}: {cause.strerror}; {advice}, or set "
                "HF_HOME to a folder on another disk."
            )
    # The innermost cause, which describes the connection.
    return HubUnreachableError(
        name,
        f"{settings.endpoint}: {_reason(causes[-1])}",
        "check the network and HF_ENDPOINT",
    )


def _rejection(error: HfHubHTTPError, name: HubName, endpoint: str) -> CheckpointError:
    """Return the error for an answer of the Hub."""
    status = error.response.status_code
    access = "set HF_TOKEN to a token of an account that may read it"
    if isinstance(error, GatedRepoError):
        return CheckpointError(
            f"{name} is gated ({status}): accept its terms at {endpoint}/{name.id}, and {access}."
        )
    if isinstance(error, RevisionNotFoundError):
        return CheckpointError(
            f"{name.id} has no revision {name.revision} on {endpoint} ({status}); after the @, "
            "write a branch, a tag or a commit of it."
        )
    if isinstance(error, RemoteEntryNotFoundError):
        return CheckpointError(
            f"{endpoint} lists a file of {name} that it does not have ({status}); try again, or "
            "use another revision."
        )
    if isinstance(error, DisabledRepoError):
        return CheckpointError(f"Access to {name} is disabled on {endpoint}; use another model.")
    if status == 401 and get_token() is not None:
        return CheckpointError(
            f"{endpoint} denies access to {name} with this token (401); check the name, and "
            f"{access}."
        )
    if isinstance(error, RepositoryNotFoundError) or status in (401, 404):
        return CheckpointError(
            f"{name} is neither a folder nor a model on {endpoint} ({status}); check the name, or "
            f"if it is private, {access}."
        )
    if status == 403:
        return CheckpointError(f"{endpoint} denies access to {name} (403); {access}.")
    if status == 429:
        return HubUnreachableError(
            name,
            f"{endpoint} is limiting the rate of requests (429)",
            "try again in a few minutes, or set HF_TOKEN for a higher limit",
        )
    if status >= 500:
        return HubUnreachableError(name, f"{endpoint} returned status {status}", "try again later")
    return CheckpointError(f"{endpoint} rejected the request for {name} with status {status}.")


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0].rstrip(".") if lines else type(error).__name__
    return text[:_MAX_REASON]
