"""Speed of every attention backend on one GPU, in one run.

    python -m bench.attention_backends --output bench/results/attention.json

32 query heads, 8 KV heads, head size 128, bfloat16. `decode` is one token for each of 64 sequences
of 2048, in TB/s of keys and values read. `paged prefill` is 8 chunks of 2048 tokens after one
cached block each, read through the cache; `ragged prefill` is 8 prompts of 2048 over their own
keys; both in TFLOP/s, 4 x visible pairs of query and key x heads x head size.

Times are medians over rounds, between CUDA events, of the attention alone: a CUDA graph with one
call per layer, planned by the backend's builder. `layer` runs the same step through the model's
layer, including its cache write; its decodes are captured and replayed by the backend's state, as
in workers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from attention.abstract import AttentionBatch, AttentionInputs, AttentionParams, AttentionSpec
from attention.gpu.metadata import GpuMetadata, GpuMetadataBuilder, TorchSDPAGpuMetadataBuilder
from attention.layer import Attention
from attention.selector import FlashInferBackend, TorchSDPAGpuBackend, XFormersBackend
from bench.records.command import command_and_date

if TYPE_CHECKING:
    from collections.abc import Callable

    from attention.abstract import AttentionBackend
    from attention.gpu.layer_kernels import LayerKernels, LayerSet

NUM_LAYERS = 8
SEQ_LEN = 2048
NUM_DECODES = 64
NUM_PREFILLS = 8
PARAMS = AttentionParams(num_heads=32, num_kv_heads=8, head_size=128, scale=128**-0.5)
TARGETS = {
    ("decode", "flashinfer"): 3.35,
    ("decode", "xformers"): 3.1,
    ("decode", "torch_sdpa"): 2.8,
    ("decode", "shared kernel"): 3.0,
    ("paged prefill", "flashinfer"): 400.0,
    ("ragged prefill", "flashinfer"): 480.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table."""

    workload: str
    backend: str
    block_size: int
    attention_us: float
    rate: float
    """TB/s of a decode, TFLOP/s of a prefill."""
    target: float | None
    layer_us: float


class SharedBuilder(TorchSDPAGpuMetadataBuilder):
    """Plans for the shared kernels alone."""

    def _make_kernels(self, layers: LayerSet) -> LayerKernels:
        from attention.gpu.shared_kernels import SharedKernels

        return SharedKernels(layers)


class SharedKernelBackend(TorchSDPAGpuBackend):
    """The shared kernels alone."""

    name = "shared kernel"
    builder_cls = SharedBuilder


BACKENDS: tuple[type[AttentionBackend], ...] = (
    FlashInferBackend,
    XFormersBackend,
    TorchSDPAGpuBackend,
    SharedKernelBackend,
)


class Bench:
    """One backend and one block size, over random keys and values."""

    def __init__(
        self, backend: type[AttentionBackend], spec: AttentionSpec, *, num_rounds: int
    ) -> None:
        self._backend = backend
        self._spec = spec
        self._num_rounds = num_rounds
        self._graph_state: object = None
        self._layers = [
            Attention(PARAMS, layer_index=i, backend=backend) for i in range(NUM_LAYERS)
        ]
        shape = backend.get_kv_cache_shape(
            num_blocks=NUM_DECODES * SEQ_LEN // spec.block_size,
            num_layers=NUM_LAYERS,
            block_size=spec.block_size,
            num_kv_heads=PARAMS.num_kv_heads,
            head_size=PARAMS.head_size,
        )
        self._cache = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()

    def decode(self) -> Row:
        """Measure decodes."""
        batch = self._batch(0, NUM_DECODES, 1, SEQ_LEN)
        builder = self._graph_builder()
        sub_batch = builder.build(batch).prepare_step().decodes
        assert sub_batch is not None
        query, key, value, out = _tokens(NUM_DECODES)
        inputs = AttentionInputs(_heads(query), _heads(key), _heads(value))

        def attend() -> None:
            for i in range(NUM_LAYERS):
                cache = builder.layer_cache(i, self._cache)
                builder.layer(i)[1].decode(sub_batch, inputs, cache, _heads(out))

        attention_us = self._timed(_captured(attend))
        num_bytes = 2 * NUM_DECODES * SEQ_LEN * PARAMS.num_kv_heads * PARAMS.head_size * 2
        return Row(
            workload="decode",
            backend=self._backend.get_name(),
            block_size=self._spec.block_size,
            attention_us=attention_us,
            rate=num_bytes / attention_us / 1e6,
            target=TARGETS.get(("decode", self._backend.get_name())),
            layer_us=self._timed(self._replayed(batch, query, key, value, out)),
        )

    def prefill(self, *, has_no_context: bool) -> Row:
        """Measure prefills, over their own keys or through the cache."""
        context = 0 if has_no_context else self._spec.block_size
        batch = self._batch(NUM_PREFILLS, NUM_PREFILLS, SEQ_LEN, context + SEQ_LEN)
        builder = self._backend.make_metadata_builder(self._spec)
        assert isinstance(builder, GpuMetadataBuilder)
        metadata = builder.build(batch)
        sub_batch = metadata.prepare_step().prefills
        assert sub_batch is not None
        query, key, value, out = _tokens(NUM_PREFILLS * SEQ_LEN)
        inputs = AttentionInputs(_heads(query), _heads(key), _heads(value))

        def attend() -> None:
            for i in range(NUM_LAYERS):
                kernels = builder.layer(i)[1]
                if has_no_context:
                    kernels.prefill_ragged(sub_batch, inputs, _heads(out))
                else:
                    cache = builder.layer_cache(i, self._cache)
                    kernels.prefill(sub_batch, inputs, cache, _heads(out))

        def forward() -> None:
            for layer in self._layers:
                layer(query, key, value, self._cache, metadata, out=out)

        attention_us = self._timed(_captured(attend))
        pairs = NUM_PREFILLS * (context * SEQ_LEN + SEQ_LEN * (SEQ_LEN + 1) // 2)
        num_operations = 4 * pairs * PARAMS.num_heads * PARAMS.head_size
        workload = "ragged prefill" if has_no_context else "paged prefill"
        return Row(
            workload=workload,
            backend=self._backend.get_name(),
            block_size=self._spec.block_size,
            attention_us=attention_us,
            rate=num_operations / attention_us / 1e6,
            target=TARGETS.get((workload, self._backend.get_name())),
            layer_us=self._timed(_captured(forward)),
        )

    def _batch(
        self, num_prefills: int, num_sequences: int, query_len: int, seq_len: int
    ) -> AttentionBatch:
        """Return sequences of equal length with blocks in random order."""
        size = self._spec.block_size
        width = -(-seq_len // size)
        blocks = np.random.default_rng(0).permutation(len(self._cache))[: num_sequences * width]
        tables = blocks.reshape(num_sequences, width)
        positions = np.arange(seq_len - query_len, seq_len)
        slots = tables[:, positions // size].astype(np.int64) * size + positions % size
        return AttentionBatch(
            num_prefills=num_prefills,
            query_lens=np.full(num_sequences, query_len, dtype=np.int32),
            seq_lens=np.full(num_sequences, seq_len, dtype=np.int32),
            block_tables=tables.astype(np.int32),
            slot_mapping=slots.reshape(-1),
        )

    def _graph_builder(self) -> GpuMetadataBuilder:
        builder_cls = self._backend.get_builder_cls()
        assert issubclass(builder_cls, GpuMetadataBuilder)
        return builder_cls(self._spec, graph_batch_size=NUM_DECODES)

    def _replayed(
        self,
        batch: AttentionBatch,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.cuda.CUDAGraph:
        """Return the graph of all layers, ready for a step."""
        state = self._backend.get_state_cls()(self._spec)
        with state.graph_capture(NUM_DECODES):
            metadata = state.graph_capture_get_metadata_for_batch(NUM_DECODES)

            def forward() -> None:
                for layer in self._layers:
                    layer(query, key, value, self._cache, metadata, out=out)

            graph = _captured(forward)
            clone = state.graph_clone(NUM_DECODES)
            buffers = clone.get_graph_input_buffers(metadata)
        live = self._backend.get_builder_cls()(self._spec).build(batch)
        assert isinstance(live, GpuMetadata)
        clone.prepare_graph_input_buffers(buffers, live)
        # The state owns the inputs of the graph and must live as long.
        self._graph_state = clone
        return graph

    def _timed(self, graph: torch.cuda.CUDAGraph) -> float:
        """Return the time of one layer in us."""
        times_us: list[float] = []
        for _ in range(self._num_rounds):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times_us.append(start.elapsed_time(stop) * 1e3 / NUM_LAYERS)
        return statistics.median(times_us)


def main() -> int:
    """Measure, print the table and write the results."""
    names = [backend.get_name() for backend in BACKENDS]
    parser = argparse.ArgumentParser(description="Speed of the attention backends on a GPU.")
    parser.add_argument("--backend", action="append", choices=names)
    parser.add_argument("--block-size", type=int, action="append", help="block sizes (16 64)")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    with torch.inference_mode():
        for backend in BACKENDS:
            if backend.get_name() in (options.backend or names):
                rows += _measure(backend, options.block_size or [16, 64], options.rounds)
    if not rows:
        return 1
    rows.sort(key=lambda row: row.workload)
    _print_table(rows)
    if options.output:
        _write(options.output, rows)
    return 0


def _measure(backend: type[AttentionBackend], block_sizes: list[int], num_rounds: int) -> list[Row]:
    rows: list[Row] = []
    for block_size in block_sizes:
        spec = AttentionSpec(
            layers=(PARAMS,) * NUM_LAYERS,
            dtype=torch.bfloat16,
            device=torch.device("cuda"),
            block_size=block_size,
            max_seq_len=SEQ_LEN,
        )
        if rejections := backend.check(spec):
            print(f"{backend.get_name()}: {'; '.join(rejections)}", file=sys.stderr)
            continue
        bench = Bench(backend, spec, num_rounds=num_rounds)
        rows += [
            bench.decode(),
            bench.prefill(has_no_context=False),
            bench.prefill(has_no_context=True),
        ]
        for row in rows[-3:]:
            print(f"{row.backend} {row.workload} {row.rate:.2f}", file=sys.stderr, flush=True)
    return rows


def _captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of `run`, captured after a few warm-up calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _tokens(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random queries, keys and values, strided as a fused projection's, and an output."""
    q_size = PARAMS.num_heads * PARAMS.head_size
    kv_size = PARAMS.num_kv_heads * PARAMS.head_size
    fused = torch.empty(count, q_size + 2 * kv_size, dtype=torch.bfloat16, device="cuda")
    query, key, value = fused.normal_().split([q_size, kv_size, kv_size], dim=1)
    return query, key, value, torch.empty_like(query, memory_format=torch.contiguous_format)


def _heads(tokens: torch.Tensor) -> torch.Tensor:
    return tokens.view(len(tokens), -1, PARAMS.head_size)


def _print_table(rows: list[Row]) -> None:
    print("| workload | backend | block | attention us | rate | target | layer us |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        unit = "TB/s" if row.workload == "decode" else "TFLOP/s"
        print(
            f"| {row.workload} | {row.backend} | {row.block_size} | {row.attention_us:.1f} "
            f"| {row.rate:.4g} {unit} | {row.target or ''} | {row.layer_us:.1f} |"
        )


def _write(path: Path, rows: list[Row]) -> None:
    results = {
        **command_and_date(),
        "gpu": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__,
            **{name: _version(name) for name in ("triton", "flashinfer-python", "xformers")},
        },
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(results, indent=1) + "\n")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
