"""A rank of a group that never communicates."""

from workers.parallel.group import SoloGroup


class LoneRank(SoloGroup):
    """Has the part of the model of one of several ranks; its sums are left to the test."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank = rank
        self.size = size
