"""Marks in a text that arrives in pieces."""

__all__ = ["overlap"]


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `mark`."""
    place = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while place >= 0:
        if mark.startswith(text[place:]):
            return len(text) - place
        place = text.find(mark[0], place + 1)
    return 0
