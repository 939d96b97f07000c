"""Files that end with a digest of their content, so that damage is detected.

Loading a library that was cut off, for example when its machine failed, would end the process with
a signal.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["is_sealed", "seal_file"]

_SIZE = hashlib.sha256().digest_size


def seal_file(path: Path) -> None:
    """Append the digest; the loader of libraries ignores it. Raises OSError."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    with path.open("ab") as file:
        file.write(digest)


def is_sealed(file: int) -> bool:
    """Return whether an open file is as it was sealed. Raises OSError."""
    content = os.pread(file, os.fstat(file).st_size, 0)
    return hashlib.sha256(content[:-_SIZE]).digest() == content[-_SIZE:]
