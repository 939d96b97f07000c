"""Shortens the token ids of a prompt to as many as the client wants to keep."""

from __future__ import annotations

__all__ = ["truncated"]


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
