"""The messages from the process that compiles templates of requests."""

import msgspec

__all__ = ["Compiled", "Died", "Rejected"]


class Compiled(msgspec.Struct, frozen=True, tag="compiled"):
    """A compiled template."""

    code: bytes
    """Code of the template, in the format of Python's `marshal`."""
    variables: tuple[str, ...]
    names: tuple[str, ...]


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The source is not a valid template."""

    reason: str


class Died(msgspec.Struct, frozen=True, tag="died"):
    """The fork that compiled was killed by a signal."""

    signal: int
