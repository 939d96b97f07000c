"""Checkpoints that are broken, not finite or unreadable, and the digests of their files."""

import json
import math
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from attention.cpu.torch_sdpa import TorchSDPABackend
from cluster.engine.engine_options import sampling_defaults
from cluster.serving.embedding_validator import SentencePrompts
from cluster.serving.text.tokenizer import Tokenizer
from pagedray.config import EngineConfig
from pagedray.errors import CheckpointError
from pagedray.model_config import Dtype
from tests.system.server_process import TINY_LLAMA
from tests.workers.lone_rank import LoneRank
from tests.workers.reference import CPU, loaded_model, save_checkpoint
from tests.workers.weights.test_weights import CASE, QUERY, rewrite
from workers.layers.weight import WeightShard
from workers.models.config_json.sentence_modules import dense_modules
from workers.models.decoder import Decoder
from workers.models.families.registry import read_model_config
from workers.parallel.group import SoloGroup
from workers.weights.checkpoint import Checkpoint
from workers.weights.load_weights import FiniteTensors, fill_shards, load_weights
from workers.weights.tensor_entries import read_entries

TIED = "llama-3-heads-1-kv-tied-linear"
# The tensors of queries, keys and values are separate, fused in order, and fused head by head.
CASES = [TIED, "phi3-window", "bloom-6-heads"]
ROOT_UID, OTHER_UID = 0, 65534
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
NUM_ROWS, NUM_COLUMNS = 9000, 1024


def _message(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        loaded_model(folder, SoloGroup())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_extra_tensor_is_named(tmp_path: Path) -> None:
    save_checkpoint(CASE, tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {"model.layers.9.mlp.secret": torch.zeros(2)})
    message = _message(tmp_path)
    assert "model.safetensors: unexpected tensor model.layers.9.mlp.secret, which" in message


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save_checkpoint(CASE, tmp_path)
    rewrite(tmp_path, lambda tensors: {k: v for k, v in tensors.items() if k != QUERY})
    assert f"tensor {QUERY} is missing" in _message(tmp_path)


def test_an_untied_head_that_is_missing_is_named(tmp_path: Path) -> None:
    save_checkpoint(CASE, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert "tensor lm_head.weight is missing" in _message(tmp_path)


def test_an_unexpected_shape_is_named(tmp_path: Path) -> None:
    save_checkpoint(CASE, tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {QUERY: torch.zeros(48, 47)})
    message = _message(tmp_path)
    assert f"model.safetensors: tensor {QUERY} has shape [48, 47], but config" in message
    assert "requires [48, 48]" in message


def test_an_unexpected_type_is_named(tmp_path: Path) -> None:
    save_checkpoint(CASE, tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {QUERY: torch.zeros(48, 48, dtype=torch.int8)})
    message = _message(tmp_path)
    assert f"tensor {QUERY} has dtype I8; supported dtypes are F64, F32" in message


@pytest.mark.parametrize("part", [0.0, 0.0001, 0.01, 0.05, 0.3, 0.7, 0.99, 0.99999])
def test_a_truncated_file_is_named(part: float, tmp_path: Path) -> None:
    save_checkpoint(CASE, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    message = _message(tmp_path)
    assert str(path) in message
    if part >= 0.3:
        assert "is truncated: tensor model." in message


def _with_length(header: dict[str, Any], data: bytes, length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


_ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (_with_length({}, b"", 2**63), f"and a header of {2**63}"),
        (_with_length({}, b"", 2**20), f"and a header of {2**20}"),
        (struct.pack("<Q", 4) + b"{]{]", "is not valid JSON"),
        (struct.pack("<Q", 2) + b"[]", "must contain a JSON object"),
        (_with_length({"a": 3}, bytes(8)), "entry of tensor a is invalid"),
        (_with_length({"a": _ENTRY | {"shape": [-2]}}, bytes(8)), "entry of tensor a is invalid"),
        (_with_length({"a": _ENTRY | {"shape": [True]}}, bytes(8)), "entry of tensor a is invalid"),
        (_with_length({"a": _ENTRY | {"shape": [3]}}, bytes(8)), "must have 12 bytes, not 8"),
        (_with_length({"a": _ENTRY | {"shape": [2**40] * 4}}, bytes(8)), "must have"),
        (_with_length({"a": _ENTRY}, bytes(4)), "truncated: tensor a ends at byte 8 of 4"),
        (_with_length({"a": _ENTRY, "b": _ENTRY}, bytes(8)), "cannot be read"),
        (_with_length({"a": _ENTRY}, bytes(12)), "cannot be read"),
    ],
)
def test_an_inconsistent_header_is_named(content: bytes, part: str, tmp_path: Path) -> None:
    save_checkpoint(CASE, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    message = _message(tmp_path)
    assert str(tmp_path / "model.safetensors") in message
    assert part in message


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    save_checkpoint(CASE, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "No model.safetensors or model.safetensors.index.json found" in _message(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_checkpoint(CASE, tmp_path, max_shard_size="60KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"the file {shard.name!r} is missing" in _message(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "part"),
    [
        (None, "weight_map must be an object"),
        ({}, "weight_map must be an object"),
        ({"a": 3}, "tensor a must be in a .safetensors file, not 3"),
        ({"a": "model.bin"}, "tensor a must be in a .safetensors file"),
        ({"a": "../outside.safetensors"}, "to a file outside of"),
        ({"a": "/etc/outside.safetensors"}, "to a file outside of"),
        ({"a": "link.safetensors"}, "to a file outside of"),
        ({"a": "x\0.safetensors"}, r"has no file 'x\x00.safetensors'"),
        ({"a": "\ud800.safetensors"}, r"has no file '\ud800.safetensors'"),
        ({"a": "x" * 300 + ".safetensors"}, "has no file 'xxx"),
        ({"a\nb": 3}, r"tensor 'a\nb' must be in"),
        ({"a": "here.safetensors"}, "tensor a is missing"),
    ],
)
def test_a_broken_index_is_named(weight_map: Any, part: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_checkpoint(CASE, folder)
    (folder / "model.safetensors").rename(folder / "here.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "outside.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    message = _message(folder)
    assert str(folder) in message
    assert part in message


def test_an_index_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.touch()
    os.truncate(index, 64 * 2**20 + 1)
    with pytest.raises(CheckpointError, match=r"index.json has more than 67108864 bytes"):
        Checkpoint(tmp_path)


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="tensor a is also in one"):
        Checkpoint(tmp_path)


def _load(folder: Path, group: SoloGroup, dtype: Dtype | None = None) -> None:
    config = read_model_config(folder, dtype=dtype)
    model = Decoder(config, group, backend=TorchSDPABackend, device=CPU)
    load_weights(model, EngineConfig(model=config))


def _change(folder: Path, name: str, change: Callable[[torch.Tensor], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors[name].view(-1))
    save_file(tensors, path)


@pytest.mark.parametrize("case", CASES)
def test_one_nan_in_any_tensor_is_found(case: str, tmp_path: Path) -> None:
    save_checkpoint(case, tmp_path)
    path = tmp_path / "model.safetensors"
    healthy = load_file(path)
    for number, name in enumerate(healthy):
        tensors = {key: tensor.clone() for key, tensor in healthy.items()}
        values = tensors[name].view(-1)
        values[(0, values.numel() // 2, -1)[number % 3]] = math.nan
        save_file(tensors, path)
        with pytest.raises(CheckpointError) as caught:
            _load(tmp_path, SoloGroup())
        assert str(caught.value) == (
            f"{path}: tensor {name} has 1 value that is NaN or infinite; download or export the "
            "checkpoint again."
        )


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_kind_of_value_is_found_in_every_type(
    dtype: Dtype, value: float, tmp_path: Path
) -> None:
    save_checkpoint(TIED, tmp_path)
    _load(tmp_path, SoloGroup(), dtype)
    _change(tmp_path, "model.norm.weight", lambda tensor: tensor[3:5].fill_(value))
    with pytest.raises(
        CheckpointError, match=r"norm\.weight has 2 values that are NaN or infinite"
    ):
        _load(tmp_path, SoloGroup(), dtype)


def test_a_rank_finds_what_is_in_its_part(tmp_path: Path) -> None:
    save_checkpoint("llama-12-heads-4-kv-llama3", tmp_path)
    name = "model.layers.0.mlp.gate_proj.weight"
    _change(tmp_path, name, lambda tensor: tensor[-1:].fill_(math.nan))
    with pytest.raises(CheckpointError, match=f"tensor {name} has 1 value that is NaN"):
        _load(tmp_path, LoneRank(1, 2))


def test_values_beyond_the_range_of_the_dtype_are_named_as_such(tmp_path: Path) -> None:
    save_checkpoint(TIED, tmp_path)
    _change(tmp_path, "model.norm.weight", lambda tensor: tensor[:1].fill_(1e5))
    _load(tmp_path, SoloGroup(), "bfloat16")
    with pytest.raises(CheckpointError) as caught:
        _load(tmp_path, SoloGroup(), "float16")
    text = "has 1 value that is beyond the range of float16; use another --dtype."
    assert str(caught.value).endswith(text)


def test_large_values_are_accepted_although_their_sum_is_infinite(tmp_path: Path) -> None:
    save_checkpoint(TIED, tmp_path)
    name = "model.layers.0.mlp.gate_proj.weight"
    _change(tmp_path, name, lambda tensor: tensor.fill_(6e4))
    _load(tmp_path, SoloGroup(), "float16")
    _change(tmp_path, name, lambda tensor: tensor.fill_(3e38))
    _load(tmp_path, SoloGroup(), "float32")
    _change(tmp_path, name, lambda tensor: tensor[-1:].fill_(-math.inf))
    with pytest.raises(CheckpointError, match=f"tensor {name} has 1 value that is NaN or"):
        _load(tmp_path, SoloGroup(), "float32")


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "stored_dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
def test_last_value_of_a_large_strided_part_is_found(
    stored_dtype: torch.dtype, target_dtype: torch.dtype, value: float, tmp_path: Path
) -> None:
    stored = torch.full((1500, 900), 0.5, dtype=stored_dtype)
    stored[-1, 599] = value
    # The value is in the second half; each is copied in several chunks.
    save_file({"a": stored}, tmp_path / "model.safetensors")
    found = []
    for first in (0, 450):
        shard = WeightShard(
            name="a",
            shape=(1500, 900),
            part=(slice(None), slice(first, first + 450)),
            # Neither its rows nor its columns are next to each other.
            target=torch.empty(3000, 900, dtype=target_dtype)[::2, ::2],
        )
        with Checkpoint(tmp_path) as checkpoint:
            tensors = FiniteTensors(checkpoint)
            fill_shards([shard], tensors)
            try:
                tensors.raise_if_not_finite()
            except CheckpointError:
                found.append(first)
        assert torch.equal(shard.target[:-1], torch.full((1499, 450), 0.5, dtype=target_dtype))
    assert found == [450]


def test_empty_parts_are_finite(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(0, 3), "b": torch.zeros(3, 4)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        tensors = FiniteTensors(checkpoint)
        parts = {"a": ((0, 3), slice(None)), "b": ((3, 4), slice(4, 4))}
        shards = [
            WeightShard(
                name=name,
                shape=shape,
                part=(slice(None), columns),
                target=torch.empty(shape)[:, columns],
            )
            for name, (shape, columns) in parts.items()
        ]
        fill_shards(shards, tensors)
        tensors.raise_if_not_finite()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A checkpoint that every user may read."""
    with TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        target = Path(name) / "model"
        shutil.copytree(TINY_LLAMA, target)
        yield target
        target.chmod(0o755)


@pytest.fixture
def forbid() -> Iterator[Callable[[Path], None]]:
    """Take the permissions of a path from this process, which root would have all the same."""

    def forbid(path: Path) -> None:
        path.chmod(0)
        if os.geteuid() == ROOT_UID:
            os.seteuid(OTHER_UID)

    yield forbid
    if os.getuid() == ROOT_UID:
        os.seteuid(ROOT_UID)


def test_a_folder_without_permission_is_named(folder: Path, forbid: Callable[[Path], None]) -> None:
    forbid(folder)
    with pytest.raises(CheckpointError, match=r"model/config\.json cannot be read: Permission"):
        read_model_config(folder)


@pytest.mark.parametrize("read", [SentencePrompts.from_folder, partial(dense_modules, size=8)])
def test_optional_settings_without_permission_are_not_ignored(
    read: Callable[[Path], object], folder: Path, forbid: Callable[[Path], None]
) -> None:
    forbid(folder)
    with pytest.raises(CheckpointError, match=r"\.json cannot be read: Permission"):
        read(folder)


@pytest.mark.parametrize("name", [WEIGHTS, INDEX])
def test_weights_without_permission_are_named(
    name: str, folder: Path, forbid: Callable[[Path], None]
) -> None:
    (folder / WEIGHTS).rename(folder / name)
    forbid(folder / name)
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} cannot be read: Permission"):
        read_entries(folder)


def test_settings_of_the_tokenizer_without_permission_are_named(
    folder: Path, forbid: Callable[[Path], None]
) -> None:
    forbid(folder / "tokenizer_config.json")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read: Permission"):
        Tokenizer.from_folder(folder)


def test_a_chat_template_without_permission_is_named(
    folder: Path, forbid: Callable[[Path], None]
) -> None:
    template = folder / "chat_template.jinja"
    template.write_text("x")
    forbid(template)
    with pytest.raises(CheckpointError, match="jinja cannot be read: Permission"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("name", [WEIGHTS, INDEX])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_weights_that_are_not_a_file_are_named(
    name: str, make: Callable[[Path], object], folder: Path
) -> None:
    (folder / WEIGHTS).unlink()
    make(folder / name)
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} is not a file"):
        read_entries(folder)


def _read_sampling_defaults(folder: Path) -> object:
    return sampling_defaults("auto", folder)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", read_model_config),
        ("generation_config.json", read_model_config),
        ("generation_config.json", _read_sampling_defaults),
        ("tokenizer.json", Tokenizer.from_folder),
        ("tokenizer_config.json", Tokenizer.from_folder),
        ("chat_template.jinja", Tokenizer.from_folder),
        (WEIGHTS, read_entries),
    ],
)
def test_a_link_whose_file_was_not_copied_is_named(
    name: str, read: Callable[[Path], object], folder: Path
) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    path.symlink_to("../../blobs/0f3e")
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} is a link to ../../blobs/0f3e"):
        read(folder)


def test_a_shard_that_links_to_itself_is_named(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    shard = folder / "one.safetensors"
    shard.symlink_to(shard)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": shard.name}}))
    with pytest.raises(CheckpointError, match=r"one\.safetensors is a link to "):
        read_entries(folder)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {"norm.weight": torch.ones(7), "embed.weight": torch.zeros(NUM_ROWS, NUM_COLUMNS)}


def digests_of(folder: Path) -> dict[str, str]:
    with Checkpoint(folder) as checkpoint:
        return checkpoint.file_digests()


def test_a_copy_has_the_same_digests(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file(tensors, tmp_path / WEIGHTS)
    before = digests_of(tmp_path)
    assert list(before) == [WEIGHTS]
    os.utime(tmp_path / WEIGHTS, (1, 1))
    assert digests_of(tmp_path) == before
    # The values are at other places of the file.
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    assert digests_of(tmp_path) == before


@pytest.mark.parametrize("row", [0, NUM_ROWS // 2, NUM_ROWS - 1], ids=["first", "middle", "last"])
def test_a_changed_part_of_a_tensor_changes_the_digest(
    row: int, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / WEIGHTS)
    before = digests_of(tmp_path)
    # As much as one part of several of a large tensor.
    width = 1 if row in (0, NUM_ROWS - 1) else NUM_ROWS // 2
    tensors["embed.weight"][max(0, row - width // 2) :][:width] = 1.0
    save_file(tensors, tmp_path / WEIGHTS)
    assert digests_of(tmp_path) != before


@pytest.mark.parametrize(
    "change",
    [
        {"norm.weight": torch.ones(7, dtype=torch.float64)},
        {"norm.weight": torch.ones(7, 1)},
        {"norm.bias": torch.ones(7)},
    ],
    ids=["dtype", "shape", "tensor"],
)
def test_other_tensors_change_the_digest(
    change: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / WEIGHTS)
    before = digests_of(tmp_path)
    save_file(tensors | change, tmp_path / WEIGHTS)
    assert digests_of(tmp_path) != before
