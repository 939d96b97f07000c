"""Parses the names of models in S3, `s3://BUCKET/PREFIX`. Sends no request to a server."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pagedray.errors import CheckpointError

__all__ = ["S3_SCHEME", "S3Location", "parse_location"]

S3_SCHEME = "s3://"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*(/[A-Za-z0-9_][A-Za-z0-9_.=+-]*)*")


@dataclass(frozen=True, slots=True)
class S3Location:
    """Where the files of a model are."""

    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"{S3_SCHEME}{self.bucket}/{self.prefix}"


def parse_location(text: str) -> S3Location:
    """Return the bucket and prefix that `text` names. Raises CheckpointError."""
    bucket, _, prefix = text.removeprefix(S3_SCHEME).rstrip("/").partition("/")
    is_valid = text.startswith(S3_SCHEME) and _BUCKET.fullmatch(bucket) and ".." not in text
    if not is_valid or not _PREFIX.fullmatch(prefix):
        raise CheckpointError(
            f"{text!r:.200} is not a folder in S3; write s3://BUCKET/PREFIX, with letters, digits "
            "and '_', '-', '.', '=', '+' in each part of the prefix."
        )
    return S3Location(bucket, prefix)
