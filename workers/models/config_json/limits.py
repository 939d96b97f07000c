"""The largest numbers that are taken from config.json: beyond them a file is damaged or hostile."""

__all__ = [
    "MAX_FACTOR",
    "MAX_HEADS",
    "MAX_HEAD_SIZE",
    "MAX_LAYERS",
    "MAX_POSITIONS",
    "MAX_SIZE",
    "MAX_THETA",
    "MAX_VOCAB",
]

MAX_SIZE = 2**20
"""Columns of a weight."""
MAX_VOCAB = 2**24
MAX_LAYERS = 1024
MAX_HEADS = 2**14
MAX_HEAD_SIZE = 1024
MAX_POSITIONS = 2**26
MAX_THETA = 1e12
"""Base of the rope."""
MAX_FACTOR = 1e6
"""Maximum of factors of the rope's positions and of a layer's values."""
