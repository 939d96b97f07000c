"""Options that contradict each other are refused."""

import pytest

from pagedray.config import ParallelConfig
from pagedray.errors import StartupError


def test_the_one_shot_all_reduce_needs_gpus() -> None:
    with pytest.raises(StartupError, match="all_reduce one_shot needs GPUs; use nccl, or device"):
        ParallelConfig(tensor_parallel_size=2, all_reduce="one_shot")
    ParallelConfig(tensor_parallel_size=2, device="cuda", all_reduce="one_shot")
