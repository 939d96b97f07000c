"""A clock that a test sets."""


class Clock:
    """Returns the seconds that the test has set, as `time.monotonic` those of the machine."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
