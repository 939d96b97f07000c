"""The working folder of a process."""

from __future__ import annotations

import os

__all__ = ["leave_removed_folder"]


def leave_removed_folder() -> None:
    """Change to the root folder if the working folder, which a process inherits, was removed.

    Libraries that look for their files, such as oneMKL, otherwise end the process.
    """
    try:
        os.getcwd()  # noqa: PTH109  # as the libraries do
    except FileNotFoundError:
        os.chdir("/")
