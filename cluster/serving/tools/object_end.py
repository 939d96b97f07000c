"""Finds the end of a JSON object in a text that arrives in pieces."""

__all__ = ["ObjectEnd"]


class ObjectEnd:
    """Reads one object; what is inside of its brackets is not validated."""

    def __init__(self) -> None:
        self.is_closed = False
        self.is_in_string = False
        """Whether a string of the object is open."""
        self._depth = 0
        self._is_escaped = False

    def read_object(self, text: str) -> int:
        """Read text and return how many of its characters belong to the object."""
        for position, character in enumerate(text):
            if self.is_in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self.is_in_string = False
            elif character == '"':
                self.is_in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_closed = True
                    return position + 1
        return len(text)
