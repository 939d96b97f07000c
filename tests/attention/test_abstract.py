"""The interface of backends: its checks and its default methods."""

import inspect
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from attention.abstract import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionSpec,
    AttentionState,
    AttentionType,
    EagerAttentionState,
)
from attention.cpu.torch_sdpa import TorchSDPABackend, TorchSDPAState
from attention.layer import Attention
from attention.selector import BACKEND_NAMES, select_backend
from tests.attention.rig import Rig, params_of

SPEC = AttentionSpec(
    layers=(params_of(),) * 2, dtype=torch.float32, device=torch.device("cpu"), block_size=16
)
Tensors = dict[str, torch.Tensor | None]


@pytest.mark.parametrize(
    "cls",
    [
        AttentionBackend,
        AttentionImpl,
        AttentionMetadata,
        AttentionMetadataBuilder,
        AttentionState,
    ],
)
def test_interfaces_are_abstract(cls: type) -> None:
    assert inspect.isabstract(cls)


def test_backend_leaves_nothing_abstract() -> None:
    assert not inspect.isabstract(TorchSDPABackend)
    assert not inspect.isabstract(TorchSDPABackend.get_impl_cls())
    assert not inspect.isabstract(TorchSDPABackend.get_metadata_cls())
    assert not inspect.isabstract(TorchSDPABackend.get_state_cls())
    assert not inspect.isabstract(TorchSDPABackend.get_builder_cls())


def test_incomplete_backend_is_rejected_when_it_is_defined() -> None:
    with pytest.raises(TypeError, match=r"Gappy does not define _problems, get_builder_cls"):

        class Gappy(AttentionBackend):
            @staticmethod
            def get_name() -> str:
                return "gappy"


class RecordingState(EagerAttentionState):
    """Counts what graph capture allocates."""

    num_held = 0
    is_broken = False

    def _allocate_capture_buffers(self, max_batch_size: int) -> None:
        self.num_held = max_batch_size
        if self.is_broken:
            raise MemoryError

    def _release_capture_buffers(self) -> None:
        self.num_held = 0


def fail_in_capture(state: RecordingState) -> None:
    assert state.num_held == 4
    raise KeyError


def test_capture_buffers_are_released_after_an_error() -> None:
    state = RecordingState(SPEC)
    with pytest.raises(KeyError), state.graph_capture(4):
        fail_in_capture(state)
    assert state.num_held == 0


def test_capture_buffers_are_released_if_they_cannot_be_allocated() -> None:
    state = RecordingState(SPEC)
    state.is_broken = True
    with pytest.raises(MemoryError), state.graph_capture(4):
        pass
    assert state.num_held == 0


def test_backend_without_graphs_says_so() -> None:
    state = TorchSDPAState(SPEC)
    assert not TorchSDPABackend.supports_graph_capture
    with (
        pytest.raises(NotImplementedError, match="TorchSDPAState does not capture graphs"),
        state.graph_capture(4),
    ):
        pass
    with pytest.raises(NotImplementedError, match="does not capture"):
        state.graph_clone(4)


def test_valid_configuration_is_accepted() -> None:
    assert TorchSDPABackend.check(SPEC) == ()
    assert TorchSDPABackend.check(replace(SPEC, dtype=torch.bfloat16)) == ()


def test_every_reason_is_given_at_once() -> None:
    layer = replace(
        params_of(),
        num_heads=5,
        alibi_slopes=(0.5,),
        sliding_window=0,
        soft_cap=-1.0,
        scale=float("nan"),
        kv_cache_dtype="fp8_e4m3",
        attention_type=AttentionType.ENCODER,
    )
    other = replace(layer, head_size=0, attention_type=AttentionType.ENCODER_DECODER)
    spec = AttentionSpec(
        layers=(layer, other), dtype=torch.float16, device=torch.device("cpu"), block_size=0
    )
    reasons = TorchSDPABackend.check(spec)
    expected = [
        "block_size is 0",
        "layers share the blocks of a cache",
        "num_heads 5 is not a multiple of num_kv_heads 2",
        "scale is nan",
        "sliding_window is 0",
        "soft_cap is -1.0",
        "1 ALiBi slopes for 5 heads",
        "head_size is 0",
        "cross attention has no sliding window",
        "cross attention has no ALiBi",
        "float16",
    ]
    assert len(reasons) == len(expected)
    for part, reason in zip(expected, reasons, strict=True):
        assert part in reason


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (replace(SPEC, device=torch.device("meta")), "device is meta"),
        (replace(SPEC, device=torch.device("cuda")), "device is cuda, but must be cpu"),
        (replace(SPEC, dtype=torch.float64), "dtype is torch.float64"),
        (replace(SPEC, layers=()), "there are no layers"),
    ],
)
def test_single_reasons(spec: AttentionSpec, reason: str) -> None:
    assert [reason in given for given in TorchSDPABackend.check(spec)] == [True]


@pytest.mark.parametrize("name", ["auto", "torch_sdpa"])
def test_selector_finds_the_backend(name: str) -> None:
    backend = select_backend(name, SPEC)
    assert backend is TorchSDPABackend
    assert backend.get_name() in BACKEND_NAMES


@pytest.mark.parametrize("name", ["hybrid", "flashinfer", "xformers"])
def test_selector_suggests_a_backend_that_supports_the_device(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"'{name}' does not support .*: .*must be cuda.* torch_sdpa\."
    ):
        select_backend(name, SPEC)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
@pytest.mark.parametrize("name", ["hybrid", "flashinfer", "xformers", "torch_sdpa"])
def test_selector_says_that_there_is_no_gpu(name: str) -> None:
    spec = replace(SPEC, device=torch.device("cuda"))
    with pytest.raises(
        ValueError, match=rf"'{name}' does not support .*: .*CUDA is not available on this machine"
    ):
        select_backend(name, spec)


def test_selector_rejects_an_unknown_name() -> None:
    with pytest.raises(
        ValueError, match=r"Unknown attention backend 'flashattention'\. Backends .* torch_sdpa"
    ):
        select_backend("flashattention", SPEC)


@pytest.mark.parametrize("name", ["auto", "torch_sdpa", "xformers"])
def test_selector_gives_every_reason(name: str) -> None:
    spec = replace(SPEC, dtype=torch.float16, block_size=0)
    pattern = "No other backend" if name == "xformers" else r"block_size is 0.*; dtype is torch.fl"
    with pytest.raises(ValueError, match=pattern):
        select_backend(name, spec)


def test_shards_share_kv_heads_when_there_are_more_ranks() -> None:
    whole = params_of(8, 2, has_alibi=True)
    assert whole.alibi_slopes is not None
    part = whole.shard(3, 4)
    assert (part.num_heads, part.num_kv_heads) == (2, 1)
    assert part.alibi_slopes == whole.alibi_slopes[6:]


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "num_ranks"), [(6, 2, 4), (12, 3, 2)])
def test_heads_that_do_not_divide_are_rejected(
    num_heads: int, num_kv_heads: int, num_ranks: int
) -> None:
    with pytest.raises(ValueError, match=f"{num_ranks} ranks"):
        params_of(num_heads, num_kv_heads).shard(0, num_ranks)


def fitting() -> tuple[Rig, Tensors]:
    rig = Rig(params_of())
    query, key, value = rig.random(6, 64), rig.random(6, 32), rig.random(6, 32)
    return rig, {"query": query, "key": key, "value": value, "kv_cache": rig.cache, "out": None}


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Tensors:
    _, tensors = fitting()
    if name == "out":
        tensors["out"] = torch.empty(6, 64)
    tensor = tensors[name]
    assert tensor is not None
    return {name: change(tensor)}


@pytest.mark.usefixtures("both_decodes")
@pytest.mark.parametrize(
    ("change", "given", "allowed"),
    [
        (changed("query", lambda t: t[:5]), r"query is \(5, 64\)", r"must be \(6, 64\)"),
        (changed("query", lambda t: t[:, :48]), r"query is \(6, 48\)", r"must be \(6, 64\)"),
        (changed("query", lambda t: t.bfloat16()), "key is .* torch.float32", "torch.bfloat16"),
        (changed("key", lambda t: t[:5]), r"key is \(5, 32\)", r"must be \(6, 32\)"),
        (changed("key", lambda t: t.double()), "key is .* torch.float64", "torch.float32"),
        (changed("key", lambda t: torch.cat([t, t], 1)[:, ::2]), "strides", "contiguous"),
        (changed("value", lambda t: None), "value is None", "both or neither"),
        ({"key": None, "value": None}, "key is None", "requires it"),
        (changed("kv_cache", lambda t: t[0]), r"kv_cache is \(1, 2, 4, 2, 16\)", r"2, 16\)"),
        (changed("kv_cache", lambda t: t.to(torch.uint8)), "torch.uint8", "torch.float32"),
        (changed("kv_cache", lambda t: t[:, :, :, :3]), r"\(96, 1, 2, 3, 2, 16\)", r"1, 2, 4, 2"),
        (changed("out", lambda t: t[:4]), r"out is \(4, 64\)", r"must be \(6, 64\)"),
        (changed("out", lambda t: torch.empty(64, 6).t()), "out has strides", "contiguous"),
    ],
)
def test_tensor_that_does_not_fit_is_rejected(change: Tensors, given: str, allowed: str) -> None:
    rig, tensors = fitting()
    metadata = rig.builder.build(rig.batch([(rig.sequence(), 5)], [], num_padding=1))
    layer: Attention = rig.layers[0]
    layer(**tensors, metadata=metadata)
    with pytest.raises(ValueError, match=f"(?s){given}.*{allowed}"):
        layer(**(tensors | change), metadata=metadata)


@pytest.mark.usefixtures("both_decodes")
def test_tensors_of_two_devices_are_rejected() -> None:
    rig, tensors = fitting()
    metadata = rig.builder.build(rig.batch([(rig.sequence(), 6)], []))
    other = changed("value", lambda t: t.to("meta"))
    with pytest.raises(ValueError, match=r"value is .* on meta, but must be .* on cpu"):
        rig.layers[0](**(tensors | other), metadata=metadata)


@pytest.mark.usefixtures("both_decodes")
def test_queries_of_another_step_are_rejected() -> None:
    rig, tensors = fitting()
    a = rig.sequence()
    rig.layers[0](**tensors, metadata=rig.builder.build(rig.batch([(a, 6)], [])))
    metadata = rig.builder.build(rig.batch([(a, 7)], []))
    with pytest.raises(ValueError, match=r"query is \(6, 64\).*must be \(7, 64\)"):
        rig.layers[0](**tensors, metadata=metadata)


@pytest.mark.usefixtures("both_decodes")
def test_keys_of_cross_attention_are_those_of_the_encoder() -> None:
    rig = Rig(params_of(), params_of(attention_type=AttentionType.ENCODER_DECODER))
    layer = Attention(rig.spec.layers[1], layer_index=1, backend=TorchSDPABackend)
    metadata = rig.builder.build(rig.batch([(rig.sequence(4), 6)], []))
    query, key = rig.random(6, 64), rig.random(6, 32)
    with pytest.raises(ValueError, match=r"key is \(6, 32\).*must be \(4, 32\)"):
        layer(query, key, key, rig.cache, metadata)
    with pytest.raises(
        ValueError, match="encoder_decoder attention requires it for 4 computed keys"
    ):
        layer(query, None, None, rig.cache, metadata)
