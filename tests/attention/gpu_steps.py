"""Checks that every backend on a GPU must pass: features, replays of graphs, no waiting."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from attention.abstract import (
    AttentionBackend,
    AttentionMetadata,
    AttentionParams,
    AttentionSpec,
    AttentionType,
)
from tests.attention.dense_reference import relative_error
from tests.attention.rig import TOLERANCE, Rig, params_of

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_Inputs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
_WINDOW = 37
FEATURES: dict[str, AttentionParams] = {
    "plain": params_of(8, 2, 128),
    "scale": params_of(8, 2, 128, scale=0.3),
    "window": params_of(8, 2, 128, sliding_window=_WINDOW),
    "cap": params_of(8, 2, 128, soft_cap=2.0),
    "window+cap": params_of(8, 2, 128, sliding_window=_WINDOW, soft_cap=2.0),
    "alibi": params_of(8, 2, 128, has_alibi=True),
    "window+alibi": params_of(8, 2, 128, sliding_window=_WINDOW, has_alibi=True),
    "sinks": params_of(8, 2, 128, has_sinks=True),
    "window+sinks": params_of(8, 2, 128, sliding_window=_WINDOW, has_sinks=True),
    "e4m3": params_of(8, 2, 128, fp8="fp8_e4m3"),
    "e5m2": params_of(8, 2, 128, fp8="fp8_e5m2"),
    "e4m3+window+cap": params_of(8, 2, 128, sliding_window=_WINDOW, soft_cap=2.0, fp8="fp8_e4m3"),
    "e4m3+window+sinks": params_of(
        8, 2, 128, sliding_window=_WINDOW, has_sinks=True, fp8="fp8_e4m3"
    ),
}
HEAD_SIZES = (64, 80, 96, 112, 120, 128, 192, 256)
BLOCK_SIZES = (16, 32, 64)
HEAD_COUNTS = {"mha": (4, 4), "3": (6, 2), "5": (10, 2), "7": (14, 2), "8": (16, 2), "mqa": (12, 1)}


def heads_of(heads: str, head_size: int, feature: str) -> AttentionParams:
    """Return a feature with other heads."""
    num_heads, num_kv_heads = HEAD_COUNTS[heads]
    params = FEATURES[feature]
    slopes = params_of(num_heads, num_kv_heads, head_size, has_alibi=True).alibi_slopes
    return replace(
        params,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        alibi_slopes=params.alibi_slopes and slopes,
        scale=head_size**-0.5 if params.scale == FEATURES["plain"].scale else params.scale,
    )


def gpu_rig(
    *layers: AttentionParams,
    backend: type[AttentionBackend],
    dtype: torch.dtype,
    block_size: int,
    is_grouped: bool = False,
) -> Rig:
    """Return a rig with room for all that `run_steps` runs.

    `is_grouped` gives the layers of each window and shape block tables of their own.
    """
    return Rig(
        *layers,
        backend=backend,
        dtype=dtype,
        block_size=block_size,
        num_blocks=(1600 // block_size + 20) * (len(layers) if is_grouped else 1),
        device="cuda",
        is_grouped=is_grouped,
    )


def run_steps(rig: Rig) -> None:
    """Run prompts, chunks, a prefix hit, decodes and mixed steps; the rig checks each."""
    a, b, c, d = (rig.sequence(n) for n in (5, 70, 1, 33))
    rig.step(prefills=[(a, 33), (b, 33)])
    rig.step(prefills=[(c, 1), (d, 150)])
    rig.step(decodes=[a, b, c, d], num_padding=3)
    rig.step(prefills=[(c, 64)], decodes=[a, b], num_padding=1)
    hit = rig.fork(d)
    rig.step(prefills=[(hit, 7), (c, 2)], decodes=[d, a])
    for _ in range(2):
        rig.step(decodes=[hit, d, c, b, a], num_padding=3)


def check_replays(
    backend: type[AttentionBackend],
    *layers: AttentionParams,
    dtype: torch.dtype,
    block_size: int,
    is_grouped: bool = False,
) -> None:
    """Check that replays equal eager steps while sequences grow into their next blocks."""
    rig = Rig(
        *layers,
        backend=backend,
        dtype=dtype,
        block_size=block_size,
        num_blocks=64,
        device="cuda",
        is_grouped=is_grouped,
    )
    a, b = rig.sequence(9), rig.sequence(40)
    rig.step(prefills=[(a, block_size - 2), (b, 2 * block_size - 1)])
    num_rows = 4
    inputs = [_device_rows(rig, params, num_rows) for params in layers]

    def forward(metadata: AttentionMetadata) -> list[torch.Tensor]:
        return [
            layer(*rows, rig.cache, metadata)
            for layer, rows in zip(rig.layers, inputs, strict=True)
        ]

    replay = _captured(replace(rig.spec, max_seq_len=6 * block_size), backend, forward, num_rows)
    for _ in range(2 * block_size if is_grouped else 4):
        for rows in (rows for parts in inputs for rows in parts if rows is not None):
            rows.copy_(rig.random(*rows.shape))
            rows[2:] = float("nan")  # Padding may hold anything.
        batch = rig.batch([], [a, b])
        metadata = rig.builder.build(batch)
        others = _take_free_memory()
        replayed = [out.clone() for out in replay(metadata)]
        del others
        expected = _eager(rig, inputs, metadata)
        for out, reference in zip(replayed, expected, strict=True):
            assert (out[2:] == 0).all()
            assert relative_error(out[:2], reference) < TOLERANCE[dtype]
        for sequence in (a, b):
            rig.advance(sequence)


def check_graph_inputs(rig: Rig, backend: type[AttentionBackend]) -> None:
    """Check that layers over the metadata of a graph follow the steps copied into its buffers."""
    a, b = rig.sequence(), rig.sequence()
    rig.step(prefills=[(a, 3), (b, 6)])
    state = backend.get_state_cls()(replace(rig.spec, max_seq_len=32))
    with state.graph_capture(4):
        captured = state.graph_capture_get_metadata_for_batch(4)
        clone = state.graph_clone(4)
        buffers = clone.get_graph_input_buffers(captured)
    inputs = []
    for params in rig.spec.layers:
        rows = _device_rows(rig, params, 4)
        for tensor in rows:
            assert tensor is not None
            tensor[2:] = float("nan")  # Padding may hold anything.
        inputs.append(rows)
    for _ in range(3):
        live = rig.builder.build(rig.batch([], [a, b]))
        clone.prepare_graph_input_buffers(buffers, live)
        for layer, (query, key, value) in zip(rig.layers, inputs, strict=True):
            assert key is not None
            assert value is not None
            replayed = layer(query, key, value, rig.cache, captured)
            expected = layer(query[:2], key[:2], value[:2], rig.cache, live)
            assert relative_error(replayed[:2].cpu(), expected.cpu()) < TOLERANCE[rig.spec.dtype]
            assert (replayed[2:] == 0).all()
        for sequence in (a, b):
            rig.advance(sequence)


def check_waits_for_nothing(
    backend: type[AttentionBackend],
    *layers: AttentionParams,
    dtype: torch.dtype,
    is_grouped: bool = False,
) -> None:
    """Check that neither planning nor running a step waits for the GPU."""
    rig = Rig(
        *layers,
        backend=backend,
        dtype=dtype,
        block_size=16,
        device="cuda",
        is_grouped=is_grouped,
    )
    a, b, c = rig.sequence(), rig.sequence(), rig.sequence()
    rig.step(prefills=[(a, 9), (b, 5)])
    batches = rig.batch([], [a, b]), rig.batch([(c, 20)], [a, b])
    inputs = [
        [_device_rows(rig, params, len(batch.slot_mapping)) for params in layers]
        for batch in batches
    ]

    def run() -> None:
        for batch, rows in zip(batches, inputs, strict=True):
            _eager(rig, rows, rig.builder.build(batch))

    run()  # Kernels are compiled and loaded when they first run.
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _take_free_memory() -> list[torch.Tensor]:
    """Return tensors in memory that others gave back, full of what no result may depend on."""
    sizes = [1 << power for power in range(7, 22) for _ in range(8)]
    return [torch.full((size,), float("nan"), device="cuda") for size in sizes]


def _captured(
    spec: AttentionSpec,
    backend: type[AttentionBackend],
    forward: Callable[[AttentionMetadata], list[torch.Tensor]],
    num_rows: int,
) -> Callable[[AttentionMetadata], list[torch.Tensor]]:
    """Return what replays a forward with other metadata."""
    state = backend.get_state_cls()(spec)
    with state.graph_capture(num_rows):
        metadata = state.graph_capture_get_metadata_for_batch(num_rows)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward(metadata)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = forward(metadata)
        clone = state.graph_clone(num_rows)
        buffers = clone.get_graph_input_buffers(metadata)

    def replay(live: AttentionMetadata) -> list[torch.Tensor]:
        clone.prepare_graph_input_buffers(buffers, live)
        graph.replay()
        return outputs

    return replay


def _device_rows(rig: Rig, params: AttentionParams, num_rows: int) -> _Inputs:
    """Return queries, keys and values of a decode; cross attention computes no keys."""
    heads = params.num_heads, params.num_kv_heads, params.num_kv_heads
    query, key, value = (
        rig.random(num_rows, n * params.head_size).to(rig.spec.device) for n in heads
    )
    if params.attention_type is AttentionType.ENCODER_DECODER:
        return query, None, None
    return query, key, value


def _eager(
    rig: Rig,
    inputs: list[_Inputs],
    metadata: AttentionMetadata,
) -> list[torch.Tensor]:
    num_tokens = len(metadata.batch.slot_mapping)
    outputs = []
    for layer, (query, key, value) in zip(rig.layers, inputs, strict=True):
        key = None if key is None else key[:num_tokens]
        value = None if value is None else value[:num_tokens]
        outputs.append(layer(query[:num_tokens], key, value, rig.cache, metadata))
    return outputs
