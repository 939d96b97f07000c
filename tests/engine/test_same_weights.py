"""Ranks that have loaded different files do not become a group."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.engine.ray_ranks import check_same_weights
from pagedray.errors import StartupError

FOLDER = Path("/models/m")
FILES = {"model-1.safetensors": "a", "model-2.safetensors": "b"}


def test_ranks_with_the_same_files_may_join() -> None:
    check_same_weights([FILES, dict(FILES), dict(FILES)], FOLDER)
    # Dummy weights have no files.
    check_same_weights([{}, {}], FOLDER)


@pytest.mark.parametrize(
    "other", [FILES | {"model-2.safetensors": "c"}, {"model-1.safetensors": "a"}]
)
def test_the_file_that_differs_is_named(other: dict[str, str]) -> None:
    expected = r"/models/m/model-2\.safetensors differs between rank 0 and rank 2"
    with pytest.raises(StartupError, match=expected):
        check_same_weights([FILES, FILES, other], FOLDER)
