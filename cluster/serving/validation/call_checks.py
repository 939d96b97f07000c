"""Checks the fields of a call other than its prompts and sampling parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.serving.inputs import MAX_CLIENT_ID_LENGTH, MAX_SALT_LENGTH
from cluster.serving.validation.prompt_reader import check_unicode
from pagedray.errors import InvalidRequestError
from pagedray.sampling_params import MAX_N
from pagedray.text import pluralize, quote

if TYPE_CHECKING:
    from cluster.serving.inputs import GenerationInput

__all__ = ["check_call", "check_num_sequences", "check_truncation", "truncated"]

_MAX_PRIORITY = 2**31 - 1


def check_call(given: GenerationInput) -> None:
    """Raise InvalidRequestError for an invalid id, priority, salt or truncation."""
    _check_client_id(given.client_id)
    _check_priority(given.priority)
    _check_cache_salt(given.cache_salt)
    check_truncation(given.max_prompt_tokens)


def check_num_sequences(num_prompts: int, n: int) -> None:
    """Raise InvalidRequestError if a call has no prompt or too many sequences."""
    if num_prompts == 0:
        raise InvalidRequestError("prompt must not be empty.", param="prompt")
    if num_prompts * n > MAX_N:
        raise InvalidRequestError(
            f"n = {n} for {pluralize(num_prompts, 'prompt')} requests {num_prompts * n} sequences; "
            f"at most {MAX_N} are allowed.",
            param="prompt" if num_prompts > 1 else "n",
        )


def check_truncation(num_kept: int | None) -> None:
    """Raise InvalidRequestError if a prompt cannot be truncated to a number of tokens."""
    if num_kept is not None and num_kept != -1 and num_kept < 1:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be -1, or 1 or more, not {quote(num_kept)}.",
            param="truncate_prompt_tokens",
        )


def _check_client_id(client_id: str | None) -> None:
    if client_id is None:
        return
    if not (0 < len(client_id) <= MAX_CLIENT_ID_LENGTH and client_id.isprintable()):
        raise InvalidRequestError(
            f"request_id must have 1 to {MAX_CLIENT_ID_LENGTH} printable characters.",
            param="request_id",
        )


def _check_priority(priority: int) -> None:
    if not -_MAX_PRIORITY - 1 <= priority <= _MAX_PRIORITY:
        raise InvalidRequestError(
            f"priority must be from {-_MAX_PRIORITY - 1} to {_MAX_PRIORITY}, not {priority}.",
            param="priority",
        )


def _check_cache_salt(salt: str) -> None:
    if len(salt) > MAX_SALT_LENGTH:
        raise InvalidRequestError(
            f"cache_salt may have at most {MAX_SALT_LENGTH} characters, not {len(salt)}.",
            param="cache_salt",
        )
    check_unicode(salt, "cache_salt")


def truncated(
    token_ids: tuple[int, ...],
    num_kept: int | None,
    *,
    truncates_end: bool,
    num_special: tuple[int, int] = (0, 0),
) -> tuple[int, ...]:
    """Return the beginning of a prompt, or its end; all of it if `num_kept` is None.

    `num_special` special tokens before and after its text are kept; there must be room for them.
    """
    if num_kept is None or len(token_ids) <= num_kept:
        return token_ids
    begin, end = num_special[0], len(token_ids) - num_special[1]
    num_removed = len(token_ids) - num_kept
    kept = (
        token_ids[begin : end - num_removed]
        if truncates_end
        else token_ids[begin + num_removed : end]
    )
    return token_ids[:begin] + kept + token_ids[end:]
