"""Tensors that do not fit a layer, its step or one another."""

from collections.abc import Callable

import pytest
import torch

from attention.abstract import AttentionType
from attention.cpu.torch_sdpa import TorchSDPABackend
from attention.layer import Attention
from tests.attention.rig import Rig, params_of

pytestmark = pytest.mark.usefixtures("both_decodes")

Tensors = dict[str, torch.Tensor | None]


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


def test_tensors_of_two_devices_are_rejected() -> None:
    rig, tensors = fitting()
    metadata = rig.builder.build(rig.batch([(rig.sequence(), 6)], []))
    other = changed("value", lambda t: t.to("meta"))
    with pytest.raises(ValueError, match=r"value is .* on meta, but must be .* on cpu"):
        rig.layers[0](**(tensors | other), metadata=metadata)


def test_queries_of_another_step_are_rejected() -> None:
    rig, tensors = fitting()
    a = rig.sequence()
    rig.layers[0](**tensors, metadata=rig.builder.build(rig.batch([(a, 6)], [])))
    metadata = rig.builder.build(rig.batch([(a, 7)], []))
    with pytest.raises(ValueError, match=r"query is \(6, 64\).*must be \(7, 64\)"):
        rig.layers[0](**tensors, metadata=metadata)


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
