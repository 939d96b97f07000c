"""The columns of fused QKV tensors that a rank reads."""

from pathlib import Path

from pagedray.model_config import ModelConfig
from tests.workers.models.families.config_json import BLOOM, MPT, PHI3, read_config
from workers.models.self_attention import qkv_columns
from workers.parallel.group import SoloGroup


def _rows(config: ModelConfig, rank: int, size: int) -> list[tuple[int, int]]:
    group = SoloGroup()
    group.rank, group.size = rank, size
    columns = qkv_columns("layer", config, 0, group)
    assert len({(part.name, part.total) for part in columns}) == 1
    return [(part.part.start, part.part.stop) for part in columns]


def test_bloom_has_all_three_of_each_head_together(tmp_path: Path) -> None:
    config = read_config(tmp_path, BLOOM)  # heads of 8
    starts = [start for start, _ in _rows(config, rank=1, size=3)]
    assert starts == [48, 72, 56, 80, 64, 88]
    assert all(stop - start == 8 for start, stop in _rows(config, rank=1, size=3))


def test_mpt_has_all_heads_of_each_kind_together(tmp_path: Path) -> None:
    config = read_config(tmp_path, MPT)
    assert _rows(config, rank=0, size=1) == [(0, 48), (48, 96), (96, 144)]
    assert _rows(config, rank=1, size=2) == [(24, 48), (72, 96), (120, 144)]


def test_ranks_of_phi3_beyond_its_kv_heads_share_one(tmp_path: Path) -> None:
    config = read_config(tmp_path, PHI3, num_key_value_heads=3)
    assert _rows(config, rank=3, size=6) == [(24, 32), (56, 64), (80, 88)]
