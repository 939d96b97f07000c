"""A small checkpoint to load, and its decoder on ranks that never communicate."""

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attention.cpu.torch_sdpa import TorchSDPABackend
from pagedray.config import EngineConfig
from pagedray.errors import CheckpointError
from pagedray.model_config import ModelConfig
from tests.workers.lone_rank import LoneRank
from tests.workers.reference import CPU, loaded_model, reference_logits, run, save_checkpoint
from workers.layers.weight import WeightShard
from workers.models.decoder import Decoder
from workers.models.families.registry import read_model_config
from workers.parallel.group import SoloGroup
from workers.weights import tensor_reader
from workers.weights.checkpoint import Checkpoint
from workers.weights.load_weights import DummyTensors, fill_shards, load_weights
from workers.weights.tensor_reader import FileRange, ReadAhead

CASE = "llama-6-heads-2-kv-biases"
UNTIED = "llama-12-heads-4-kv-llama3"
"""Its head is not tied to its embedding."""
QUERY = "model.layers.0.self_attn.q_proj.weight"
"""A tensor of both."""
_WHOLE = (slice(None), slice(None))
LIMIT_S = 60.0


def decoder_of(config: ModelConfig, rank: int = 0, size: int = 1) -> Decoder:
    """Return the decoder of a rank, without weights."""
    return Decoder(config, LoneRank(rank, size), backend=TorchSDPABackend, device=CPU)


def rewrite(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    """Replace the tensors of a checkpoint in one file."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


class _Recorder:
    """A source that only counts the elements requested of each tensor."""

    def __init__(self) -> None:
        self.elements: dict[str, int] = {}

    def fill_shard(self, shard: WeightShard) -> None:
        part = [end - first for first, end, _ in _indices(shard)]
        assert part == list(shard.target.shape)
        self.elements[shard.name] = self.elements.get(shard.name, 0) + shard.target.numel()


def _indices(shard: WeightShard) -> list[tuple[int, int, int]]:
    return [s.indices(n) for s, n in zip(shard.part, shard.shape, strict=True)]


@pytest.mark.parametrize("name", [UNTIED, "bloom-6-heads", "mpt-12-heads", "phi3-window"])
def test_two_ranks_read_each_sharded_element_once(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    config = read_model_config(tmp_path)
    recorder = _Recorder()
    shards = [list(decoder_of(config, rank, 2).weight_shards()) for rank in range(2)]
    for of_rank in shards:
        fill_shards(of_rank, recorder)
    # Whole on every rank, unless it is also the output layer.
    whole = set() if config.has_tied_embeddings else {f"{config.names.embedding}.weight"}
    for shard in shards[0]:
        is_of_norm = shard.dummy is not None
        times = 2 if is_of_norm or shard.name in whole else 1
        assert recorder.elements[shard.name] == times * torch.Size(shard.shape).numel()


def test_threads_load_what_one_thread_loads(tmp_path: Path) -> None:
    save_checkpoint(UNTIED, tmp_path)
    config = read_model_config(tmp_path)
    alone, together = (list(decoder_of(config, 1, 2).weight_shards()) for _ in range(2))
    reported: list[tuple[int, int]] = []
    with Checkpoint(tmp_path) as checkpoint:
        fill_shards(alone, checkpoint)
        fill_shards(
            together,
            checkpoint,
            lambda done, total: reported.append((done, total)),
            num_threads=4,
        )
    assert reported == [(done, len(together)) for done in range(len(together) + 1)]
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.target, other.target)


def test_error_in_one_of_several_threads_is_raised(tmp_path: Path) -> None:
    save_checkpoint(UNTIED, tmp_path)
    shards = list(decoder_of(read_model_config(tmp_path)).weight_shards())

    class Broken:
        def fill_shard(self, shard: WeightShard) -> None:
            if shard is shards[-1]:
                raise CheckpointError("The tensor cannot be read.")

    with pytest.raises(CheckpointError, match="cannot be read"):
        fill_shards(shards, Broken(), num_threads=4)


def test_pieces_of_large_tensors_are_loaded_and_reported_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.weights.load_weights._PIECE_BYTES", 1000)
    stored = {"a": torch.randn(70, 40), "b": torch.randn(9), "c": torch.randn(31, 2, 8)}
    save_file(stored, tmp_path / "model.safetensors")
    parts = {"a": (slice(7, 61), slice(10, 30)), "b": (slice(9),), "c": (slice(31),) * 3}
    shards = [
        WeightShard(
            name=name,
            shape=tuple(values.shape),
            part=parts[name],
            target=torch.empty_like(values[parts[name]]),
        )
        for name, values in stored.items()
    ]
    reported: list[int] = []
    with Checkpoint(tmp_path) as checkpoint:
        fill_shards(shards, checkpoint, lambda done, _: reported.append(done), num_threads=3)
    for shard in shards:
        assert torch.equal(shard.target, stored[shard.name][shard.part])
    assert sorted(reported) == reported
    assert set(reported) == {0, 1, 2, 3}
    assert len(reported) > 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunk_bytes", [1, 700, 5000, 10**6])
def test_chunks_together_are_the_tensor(
    dtype: torch.dtype, chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.weights.tensor_reader._CHUNK_BYTES", chunk_bytes)
    stored = torch.randn(37, 6, 50).to(dtype)
    tensors = {"b": stored, "a": -stored, "c": stored.float()}
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        assert torch.equal(torch.cat([chunk.clone() for chunk in checkpoint.chunks("a")]), -stored)
        assert not checkpoint.are_equal("a", "b")
        assert not checkpoint.are_equal("b", "c")
        assert checkpoint.are_equal("b", "b")


@pytest.mark.parametrize("most_bytes", [None, 777])
@pytest.mark.parametrize(
    "columns", [slice(0, 300), slice(300, 700), slice(1, 999), slice(990, 1000), slice(0, 1000)]
)
def test_columns_are_read_to_their_place(
    columns: slice, most_bytes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_less(descriptor: int, buffers: Sequence[memoryview], position: int) -> int:
        return read(descriptor, [buffers[0][:most_bytes]], position)

    read = os.preadv
    if most_bytes is not None:
        monkeypatch.setattr("workers.weights.tensor_reader.os.preadv", read_less)
    stored = torch.randn(1200, 1000)
    save_file({"a": stored}, tmp_path / "model.safetensors")
    part = (slice(7, 1190), columns)
    shard = WeightShard(
        name="a",
        shape=(1200, 1000),
        part=part,
        target=torch.full((1183, columns.stop - columns.start), torch.nan),
    )
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.fill_shard(shard)
        assert torch.equal(shard.target, stored[part])
        with (tmp_path / "model.safetensors").open("r+b") as file:
            # Within the last rows, of which the first ones can still be read.
            file.truncate(4_700_000)
        with pytest.raises(CheckpointError, match=r"model.safetensors is truncated"):
            checkpoint.fill_shard(shard)


def test_file_that_becomes_shorter_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.randn(1000, 1000)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        with (tmp_path / "model.safetensors").open("r+b") as file:
            file.truncate(3_000_000)
        with pytest.raises(CheckpointError, match=r"model.safetensors is truncated: .*3000000"):
            list(checkpoint.chunks("a"))


def test_file_that_disappears_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.randn(10)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"tensor a cannot be read: No such file"):
            list(checkpoint.chunks("a"))


def test_shards_are_read_in_the_order_of_the_files(tmp_path: Path) -> None:
    save_checkpoint(UNTIED, tmp_path, max_shard_size="60KB")
    shards = list(decoder_of(read_model_config(tmp_path)).weight_shards())
    with Checkpoint(tmp_path) as checkpoint:
        in_order = checkpoint.in_file_order(shards)
        paths = [checkpoint.path_of(shard.name) for shard in in_order]
    assert len(in_order) == len(shards)
    assert paths == sorted(paths)
    assert len(set(paths)) > 2


def test_speed_of_loading_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_checkpoint(CASE, tmp_path)
    with caplog.at_level("INFO", "workers.weights"):
        loaded_model(tmp_path, SoloGroup())
    assert re.search(r"Loaded \d+\.\d\d GB of weights in \d+\.\d s, ", caplog.text)


def test_ranks_that_exceed_kv_heads_read_the_same_one(tmp_path: Path) -> None:
    save_checkpoint(UNTIED, tmp_path)
    config = read_model_config(tmp_path)
    parts = [
        next(s.part for s in decoder_of(config, rank, 12).weight_shards() if "k_proj" in s.name)
        for rank in range(12)
    ]
    assert [part[0].start // config.head_size for part in parts] == [r // 3 for r in range(12)]


def test_shards_and_an_index_are_read(tmp_path: Path) -> None:
    save_checkpoint(UNTIED, tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    group = SoloGroup()
    logits = run(loaded_model(tmp_path, group), group)
    torch.testing.assert_close(logits, reference_logits(tmp_path), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_are_converted(dtype: torch.dtype, tmp_path: Path) -> None:
    save_checkpoint(CASE, tmp_path)
    rewrite(tmp_path, lambda tensors: {k: v.to(dtype) for k, v in tensors.items()})
    group = SoloGroup()
    rounded = run(loaded_model(tmp_path, group), group)
    rewrite(tmp_path, lambda tensors: {k: v.float() for k, v in tensors.items()})
    assert torch.equal(run(loaded_model(tmp_path, group), group), rounded)


def test_progress_counts_tensors(tmp_path: Path) -> None:
    save_checkpoint(CASE, tmp_path)
    config = read_model_config(tmp_path)
    model = decoder_of(config)
    total = len(list(model.weight_shards()))
    seen: list[tuple[int, int]] = []
    load_weights(model, EngineConfig(model=config), lambda done, total: seen.append((done, total)))
    assert seen == [(done, total) for done in range(total + 1)]


def test_files_are_closed_after_loading(tmp_path: Path) -> None:
    save_checkpoint(CASE, tmp_path)
    loaded_model(tmp_path, SoloGroup())
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(tmp_path) not in maps.read_text()


@pytest.mark.parametrize(
    "extra", ["model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"]
)
def test_harmless_extra_tensors_are_ignored(extra: str, tmp_path: Path) -> None:
    save_checkpoint(CASE, tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {extra: torch.zeros(2)})
    loaded_model(tmp_path, SoloGroup())


@pytest.mark.parametrize("name", ["bloom-6-heads", UNTIED])
def test_a_decoder_saved_without_its_head_is_read(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    group = SoloGroup()
    logits = run(loaded_model(tmp_path, group), group)
    rewrite(
        tmp_path,
        lambda tensors: {
            key.removeprefix("transformer.").removeprefix("model."): tensor
            for key, tensor in tensors.items()
        },
    )
    assert torch.equal(run(loaded_model(tmp_path, group), group), logits)


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    blobs = tmp_path / "models--org--name" / "blobs"
    folder = tmp_path / "models--org--name" / "snapshots" / "abc"
    save_checkpoint(CASE, folder)
    blobs.mkdir()
    (folder / "model.safetensors").rename(blobs / "123")
    (folder / "model.safetensors").symlink_to(Path("../../blobs/123"))
    loaded_model(folder, SoloGroup())


@pytest.mark.parametrize("size", [2, 4])
def test_dummy_weights_do_not_depend_on_the_ranks(size: int, tmp_path: Path) -> None:
    save_checkpoint(UNTIED, tmp_path)
    config = read_model_config(tmp_path)
    whole = {shard.name: shard for shard in decoder_of(config).weight_shards()}
    fill_shards(list(whole.values()), DummyTensors(7))
    for rank in range(size):
        shards = list(decoder_of(config, rank, size).weight_shards())
        fill_shards(shards, DummyTensors(7))
        for shard in shards:
            assert torch.equal(shard.target, whole[shard.name].target[shard.part])


def test_dummy_weights_cross_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.weights.load_weights._CHUNK_ELEMENTS", 30)
    whole, part = torch.zeros(11, 7), torch.zeros(4, 5)
    DummyTensors(1).fill_shard(
        WeightShard(name="w", shape=(11, 7), part=(slice(None), slice(None)), target=whole)
    )
    DummyTensors(1).fill_shard(
        WeightShard(name="w", shape=(11, 7), part=(slice(3, 7), slice(2, 7)), target=part)
    )
    assert torch.equal(part, whole[3:7, 2:7])
    assert len(whole.unique()) == 77


def test_dummy_weights_need_no_files_and_depend_on_the_seed(tmp_path: Path) -> None:
    save_checkpoint(CASE, tmp_path)
    config = read_model_config(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    group = SoloGroup()

    def logits(seed: int) -> torch.Tensor:
        model = decoder_of(config)
        load_weights(model, EngineConfig(model=config, load_format="dummy", load_seed=seed))
        return run(model, group)

    assert torch.equal(logits(3), logits(3))
    assert not torch.equal(logits(3), logits(4))
    assert logits(3).isfinite().all()


@pytest.mark.parametrize(
    ("name", "weight"), [("gemma3-two-ropes", 0.0), ("bloom-6-heads", 1.0), ("mpt-12-heads", 1.0)]
)
def test_dummy_norms_change_no_scale(name: str, weight: float, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    shards = list(decoder_of(read_model_config(tmp_path)).weight_shards())
    fill_shards(shards, DummyTensors(7))
    weights = [
        shard.target for shard in shards if shard.name.endswith(".weight") and len(shard.part) == 1
    ]
    assert len(weights) >= 7
    assert all((target == weight).all() for target in weights)


class Advice:
    """Keeps what the kernel is asked for, in place of asking it."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self.asked: list[tuple[int, int, int]] = []

    def ask(self, descriptor: int, position: int, num_bytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        with self._condition:
            self.asked.append((descriptor, position, num_bytes))
            self._condition.notify()

    def wait_for(self, num_bytes: int) -> None:
        with self._condition:
            assert self._condition.wait_for(lambda: self.num_bytes >= num_bytes, LIMIT_S)

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, _, num_bytes in self.asked)


@pytest.fixture
def advice(monkeypatch: pytest.MonkeyPatch) -> Iterator[Advice]:
    advice = Advice()
    monkeypatch.setattr(os, "posix_fadvise", advice.ask)
    monkeypatch.setattr(tensor_reader, "_STEP_BYTES", 4)
    monkeypatch.setattr(tensor_reader, "_MOST_BYTES", 16)
    monkeypatch.setattr(tensor_reader, "_FEW_BYTES", 8)
    yield advice
    assert not any(thread.name == "pagedray-read-ahead" for thread in threading.enumerate())


def test_ranges_are_asked_for_in_order_and_whole(advice: Advice) -> None:
    ahead = ReadAhead(
        [
            FileRange(descriptor=3, first_byte=10, num_bytes=6),
            FileRange(descriptor=3, first_byte=40, num_bytes=0),
            FileRange(descriptor=5, first_byte=0, num_bytes=3),
        ]
    )
    advice.wait_for(9)
    ahead.close()
    assert advice.asked == [(3, 10, 4), (3, 14, 2), (5, 0, 3)]


def test_no_more_is_asked_for_than_the_bound_until_much_was_read(advice: Advice) -> None:
    ahead = ReadAhead([FileRange(descriptor=3, first_byte=0, num_bytes=100)])
    advice.wait_for(16)
    ahead.note_read(8)
    # 8 are ahead, which is not less than a few.
    ahead.note_read(1)
    advice.wait_for(28)
    ahead.close()
    assert advice.num_bytes == 28


def test_closing_ends_a_thread_that_waits(advice: Advice) -> None:
    ahead = ReadAhead([FileRange(descriptor=3, first_byte=0, num_bytes=100)])
    advice.wait_for(16)
    ahead.close()
    assert advice.num_bytes == 16


def test_a_checkpoint_asks_for_what_its_shards_read(
    advice: Advice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_reader, "_MOST_BYTES", 2**20)
    tensors = {"a": torch.randn(40, 6), "b": torch.randn(9), "c": torch.randn(7, 5)}
    save_file(tensors, tmp_path / "model.safetensors")
    shards = [
        WeightShard(name="c", shape=(7, 5), part=_WHOLE, target=torch.empty(7, 5)),
        WeightShard(
            name="a", shape=(40, 6), part=(slice(3, 30), slice(None)), target=torch.empty(27, 6)
        ),
        WeightShard(name="b", shape=(9,), part=_WHOLE[:1], target=torch.empty(9)),
    ]
    num_bytes = sum(shard.target.nbytes for shard in shards)
    read: list[int] = []
    read_into = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], position: int) -> int:
        read.extend(range(position, position + sum(len(buffer) for buffer in buffers)))
        return read_into(descriptor, buffers, position)

    with Checkpoint(tmp_path) as checkpoint:
        in_order = checkpoint.in_file_order(shards)
        checkpoint.read_ahead(in_order)
        advice.wait_for(num_bytes)
        monkeypatch.setattr(os, "preadv", counted)
        for shard in in_order:
            checkpoint.fill_shard(shard)
    asked = [at for _, first, size in advice.asked for at in range(first, first + size)]
    assert len(asked) == num_bytes
    assert asked == read
