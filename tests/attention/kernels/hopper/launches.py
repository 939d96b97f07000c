"""Launches of our kernels with the shapes and tunings of served models."""

from collections.abc import Callable
from functools import partial

import torch

from attention.kernels.arguments import (
    NUM_ITEM_WORDS,
    DecodeItems,
    DecodeScratch,
    DeferredRMSNorm,
    DeltaGates,
    ExpertWeights,
    GatedNorm,
    NewTokens,
    QuantizedRows,
    Rotary,
    RowConv,
    ScanGates,
    Segments,
)
from attention.kernels.triton.causal_conv import causal_conv
from attention.kernels.triton.chunk_attention import paged_attention
from attention.kernels.triton.delta_rule import delta_rule
from attention.kernels.triton.draft_rows import (
    BegunDrafts,
    begin_drafts,
    key_drafts,
    place_drafts,
    publish_drafts,
)
from attention.kernels.triton.experts import choose_experts, expert_sums, mxfp4_row_bytes
from attention.kernels.triton.fp8_rows import quantize_blocks, quantize_rows
from attention.kernels.triton.gated_activation import quantized_gated
from attention.kernels.triton.gemm.block_fp8 import block_fp8_gemm
from attention.kernels.triton.gemm.fp8_tiles import fp8_tiles_gemm, fp8_tiling, new_arrivals
from attention.kernels.triton.gemm.gemv import add_gemv, default_gemv_tuning, gemv, gemv_gated
from attention.kernels.triton.gemm.int4 import (
    MAX_GATED_ROWS,
    dequantize_int4,
    int4_gated,
    int4_gemm,
)
from attention.kernels.triton.gemm.normed_gemv import normed_gemv, normed_gemv_gated
from attention.kernels.triton.gemm.persistent_gated import persistent_gated
from attention.kernels.triton.gemm.persistent_rotated import persistent_rotated
from attention.kernels.triton.gemm.skinny import (
    default_skinny_tuning,
    fp8_skinny_tuning,
    skinny_gated,
    skinny_gemm,
)
from attention.kernels.triton.norm_rope import (
    add_norm,
    norm_heads,
    quantized_add_norm,
    rotate_heads,
)
from attention.kernels.triton.one_shot_all_reduce import (
    Inboxes,
    all_reduce_add_norm,
    all_reduce_rows,
)
from attention.kernels.triton.received_rows import (
    ReceivedRows,
    add_received,
    add_received_norm,
)
from attention.kernels.triton.selective_scan import selective_scan
from attention.kernels.triton.tuning import AttentionOptions, default_decode_tuning
from attention.kernels.triton.write_new_tokens import write_new_tokens
from tests.attention.kernels.decode_launch import paged_decode

BF16, FP8, INT = torch.bfloat16, torch.float8_e4m3fn, torch.int32


class OnGpu(torch.Tensor):
    """A tensor on the CPU that says that it is on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype).as_subclass(OnGpu)


def experts(dtype: torch.dtype) -> None:
    """Choose, group and multiply as many rows as need each tuning."""
    for num_rows in (1, 9, 200, 600, 4096):
        x = tensor(num_rows, 256, dtype=dtype)
        chosen, weights = choose_experts(
            tensor(num_rows, 128, dtype=dtype), 8, is_renormalized=True
        )
        stored = ExpertWeights(
            first_expert=0,
            gate_up=tensor(128, 2 * 64, 256, dtype=dtype),
            down=tensor(128, 256, 64, dtype=dtype),
        )
        expert_sums(x, chosen, weights, stored)


def experts_without_gates() -> None:
    """Multiply rows of few and many pairs, with the experts of Nemotron 3 Nano."""
    stored = ExpertWeights(
        first_expert=0,
        gate_up=tensor(128, 1856, 2688),
        down=tensor(128, 2688, 1856),
        activation="relu2",
    )
    for num_rows in (1, 256):
        weights = tensor(num_rows, 6, dtype=torch.float32)
        expert_sums(tensor(num_rows, 2688), tensor(num_rows, 6, dtype=INT), weights, stored)


def mxfp4_experts() -> None:
    """The same with weights in mxfp4, biases and clamped gates, as gpt-oss-20b has them."""
    size, num_experts = 2880, 32
    stored = ExpertWeights(
        first_expert=0,
        gate_up=tensor(num_experts, 2 * size, mxfp4_row_bytes(size), dtype=torch.uint8),
        down=tensor(num_experts, size, mxfp4_row_bytes(size), dtype=torch.uint8),
        gate_up_scales=tensor(num_experts, size // 32, 2 * size, dtype=torch.uint8),
        down_scales=tensor(num_experts, size // 32, size, dtype=torch.uint8),
        gate_up_bias=tensor(num_experts, 2 * size),
        down_bias=tensor(num_experts, size),
        clamp=(1.702, 7.0),
    )
    for num_rows in (1, 40, 256, 4096):
        expert_sums(
            tensor(num_rows, size),
            tensor(num_rows, 4, dtype=INT),
            tensor(num_rows, 4, dtype=torch.float32),
            stored,
        )


def many_gated_rows() -> None:
    """Multiply many rows, with a gate, in each number of stages; then numbers of rows beside."""
    weight = tensor(2 * 14336, 4096)
    for num_rows in (256, 255, 8192, 8191):
        persistent_gated(tensor(num_rows, 4096), weight, "silu", 132)


def many_rotated_rows() -> None:
    """Multiply many rows, and rotate queries and keys; then a number of rows beside."""
    table, weight = tensor(131072, 128, dtype=torch.float32), tensor(6144, 4096)
    for num_rows in (8192, 8191):
        rotary = Rotary(tensor(num_rows, dtype=torch.int64), table)
        out = tensor(num_rows, 6144)
        persistent_rotated(tensor(num_rows, 4096), weight, rotary, 5120, out, 132)


def fp8_tiles() -> None:
    """Multiply fp8 rows in small tiles of each size."""
    weight_scales = tensor(4096, 1, dtype=torch.float32)
    for num_rows in (256, 192, 128, 64, 32):
        values, scales = (
            tensor(num_rows, 14336, dtype=FP8),
            tensor(num_rows, 1, dtype=torch.float32),
        )
        tiling = fp8_tiling(num_rows, 4096, 14336, 132)
        assert tiling is not None
        fp8_tiles_gemm(
            QuantizedRows(values, scales, BF16),
            tensor(4096, 14336, dtype=FP8),
            weight_scales,
            tiling,
            new_arrivals(4096, values.device),
        )


def skinny(scale_depth: int | None) -> None:
    """Multiply a few rows, with and without a gate; with a depth, by weights in fp8."""
    weight, scales = tensor(2048, 4096), None
    plain = default_skinny_tuning(2048, 4096, is_gated=False)
    gated = default_skinny_tuning(2048, 4096, is_gated=True)
    if scale_depth is not None:
        weight = tensor(2048, 4096, dtype=FP8)
        scales = tensor(2048, 4096 // scale_depth, dtype=torch.float32)
        plain = fp8_skinny_tuning(2048, 4096, scale_depth, is_gated=False)
        gated = fp8_skinny_tuning(2048, 4096, scale_depth, is_gated=True)
    for num_rows in (2, 16):
        x = tensor(num_rows, 4096)
        assert plain is not None
        assert gated is not None
        skinny_gemm(x, weight, None, plain, scales=scales)
        skinny_gated(x, weight, "silu", gated, scales=scales)


def row(format: str) -> None:
    """Multiply one row, with and without a gate, by short and long columns."""
    for size in (4096, 14336):
        weight, scales = tensor(2048, size), None
        if format == "fp8":
            weight, scales = tensor(2048, size, dtype=FP8), tensor(2048, 1, dtype=torch.float32)
        elif format == "fp8 blocks":
            weight = tensor(2048, size, dtype=FP8)
            scales = tensor(2048, size // 128, dtype=torch.float32)
        elif format == "int4":
            weight = tensor(2048, size // 2, dtype=torch.uint8)
            scales = tensor(size // 128, 2048, dtype=INT)
        for is_gated in (False, True):
            tuning = default_gemv_tuning(weight, is_gated=is_gated)
            assert tuning is not None
            if is_gated:
                gemv_gated(tensor(1, size), weight, "silu", tuning, scales=scales)
            else:
                gemv(tensor(1, size), weight, None, tuning, scales=scales)


def layer_of_one_row() -> None:
    """Multiply the norm of a row, with and without a gate; add a product to a row."""
    for size in (4096, 8192):
        weight = tensor(2048, size)
        for norm_type in (BF16, torch.float32):
            unnormed = DeferredRMSNorm(tensor(1, size), tensor(size, dtype=norm_type), 1e-5)
            for is_gated in (False, True):
                tuning = default_gemv_tuning(weight, is_gated=is_gated)
                assert tuning is not None
                if is_gated:
                    normed_gemv_gated(unnormed, weight, "silu", tuning)
                else:
                    normed_gemv(unnormed, weight, None, tuning)
    weight = tensor(12352, 2048)
    tuning = default_gemv_tuning(weight, is_gated=False)
    assert tuning is not None
    conv = RowConv(
        first_column=0,
        weight=tensor(8192, 4),
        bias=None,
        states=tensor(4, 3, 8192),
        rows=tensor(1, dtype=INT),
    )
    unnormed = DeferredRMSNorm(tensor(1, 2048), tensor(2048, dtype=torch.float32), 1e-6)
    normed_gemv(unnormed, weight, None, tuning, conv)
    for size in (4096, 14336):
        weight = tensor(4096, size)
        tuning = default_gemv_tuning(weight, is_gated=False)
        assert tuning is not None
        add_gemv(tensor(1, 4096), tensor(1, size), weight, None, tuning)


def quantized() -> None:
    """Quantize rows with a scale each, and with one for all, and what kernels compute."""
    for size in (4096, 14336):
        quantize_rows(tensor(256, size), None)
        quantize_rows(tensor(256, size), tensor(1, dtype=torch.float32))
        quantized_gated(tensor(256, 2 * size), "silu")
        quantized_add_norm(
            tensor(256, size), tensor(256, size), tensor(size), None, 1e-5, is_centered=False
        )


def blocks() -> None:
    """Quantize the blocks of rows, and multiply them."""
    weight, scales = tensor(2048, 4096, dtype=FP8), tensor(2048, 32, dtype=torch.float32)
    for num_rows in (17, 256):
        rows, row_scales = quantize_blocks(tensor(num_rows, 4096), 128)
        block_fp8_gemm(
            rows.as_subclass(OnGpu), row_scales, weight, scales, None, depth=128, dtype=BF16
        )


def int4(group_size: int) -> None:
    """Multiply as many rows as need each tile, with and without a gate; and dequantize."""
    weight = tensor(2048, 2048, dtype=torch.uint8)
    words = tensor(4096 // group_size, 2048, dtype=INT)
    for num_rows in (1, 16, 32, 64):
        x = tensor(num_rows, 4096)
        int4_gemm(x, weight, words, None)
        if num_rows <= MAX_GATED_ROWS:
            int4_gated(x, weight, words, "silu")
    dequantize_int4(weight, words, BF16)


def attention(
    *,
    has_sinks: bool,
    head_size: int = 128,
    num_heads: int = 32,
    cache_type: torch.dtype = BF16,
    window_left: int = -1,
) -> None:
    """Attend from chunks and from decodes."""
    num_kv_heads, block_size, batch = 8, 16, 64
    cache = tensor(1024, 2, block_size, num_kv_heads, head_size, dtype=cache_type)
    sinks = tensor(num_heads, dtype=torch.float32) if has_sinks else None
    tables, lens = tensor(batch, 128, dtype=INT), tensor(batch, dtype=INT)
    options = AttentionOptions(
        scale=head_size**-0.5, window_left=window_left, window_right=0, k_scale=0.5, v_scale=2.0
    )
    query = tensor(batch, num_heads, head_size)
    new = None
    if cache_type == BF16 and head_size == 128:
        key, places = tensor(batch, num_kv_heads, head_size), tensor(batch, dtype=torch.int64)
        table = tensor(4096, head_size, dtype=torch.float32)
        new = NewTokens(key, key, places, Rotary(places, table))
        write_new_tokens(query, new, cache[:, 0], cache[:, 1])
    tuning = default_decode_tuning(
        num_queries_per_kv=num_heads // num_kv_heads, head_size=head_size, dtype=BF16
    )
    rows_per_item = tuning.tile_vectors * num_kv_heads // num_heads
    items = DecodeItems(
        tensor(batch, NUM_ITEM_WORDS * (1 + rows_per_item), dtype=INT),
        batch,
        DecodeScratch(
            tensor(batch * num_heads * (head_size + 1), dtype=torch.float32),
            tensor(batch * num_kv_heads, dtype=INT),
        ),
    )
    paged_decode(
        query,
        cache,
        block_tables=tables,
        items=items,
        options=options,
        tuning=tuning,
        out=torch.empty_like(query),
        sinks=sinks,
        new=new,
    )
    prompt = tensor(2048, num_heads, head_size)
    paged_attention(
        prompt,
        cache,
        query_starts=tensor(batch + 1, dtype=INT),
        seq_lens=lens,
        block_tables=tables,
        max_query_len=2048,
        options=options,
        out=torch.empty_like(prompt),
        sinks=sinks,
    )


def rows() -> None:
    """Norms and rotations."""
    stream, weight = tensor(64, 4096), tensor(4096)
    for overlaps in (False, True):
        add_norm(stream, tensor(64, 4096), weight, None, 1e-5, is_centered=False, overlaps=overlaps)
    heads = tensor(64, 32, 128)
    norm_heads(heads, tensor(32, 128), 1e-6)
    rotate_heads(heads, tensor(64, dtype=torch.int64), tensor(4096, 128, dtype=torch.float32))


def sums_over_ranks() -> None:
    """Sums over two ranks with the norm behind them, of few and of many rows."""
    weight = tensor(4096)
    inboxes = Inboxes(
        addresses=tensor(4, dtype=torch.int64),
        num_launches=tensor(8192, dtype=INT),
        rank=0,
        size=2,
        max_programs=264,
        width=4096,
        dtype=BF16,
    )
    for num_rows in (64, 1024):
        stream, delta = tensor(num_rows, 4096), tensor(num_rows, 4096)
        all_reduce_rows(delta, inboxes)
        all_reduce_add_norm(stream, delta, weight, None, 1e-5, is_centered=False, inboxes=inboxes)
        received = ReceivedRows(
            rows=tensor(num_rows, 4096),
            flag=tensor(1, dtype=INT),
            number=tensor(1, dtype=INT),
            abort=tensor(1, dtype=torch.int64),
        )
        add_received(delta, received)
        add_received_norm(stream, delta, received, weight, None, 1e-5, is_centered=False)


def recurrent(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    """Run steps of layers with recurrent state, as Qwen3.5-35B-A3B or Mamba-2."""
    for num_tokens, num_segments, num_spares, is_chained, keeps_states in (
        (1, 1, 0, False, False),
        (64, 64, 0, False, False),
        (2048, 3, 0, False, False),
        (2048, 3, 8, False, False),
        (8, 8, 0, True, True),
        (8, 16, 0, True, False),
    ):
        segments = Segments(
            query_starts=tensor(num_segments + 1, dtype=INT),
            rows=tensor(num_segments, dtype=INT),
            max_query_len=8 if is_chained else num_tokens // num_segments,
            save_ends=tensor(num_spares, dtype=INT) if num_spares else None,
            is_chained=is_chained,
            keeps_states=keeps_states,
        )
        mixed = tensor(num_tokens, 8192, dtype=dtype)
        conv_states = tensor(64, 3, 8192, dtype=dtype)
        causal_conv(mixed, tensor(8192, 4, dtype=dtype), None, conv_states, segments, "silu")
        keys, values = mixed[:, :4096].unflatten(1, (2, 16, 128)), mixed[:, 4096:]
        gates = DeltaGates(
            a=tensor(num_tokens, 32, dtype=dtype),
            b=tensor(num_tokens, 32, dtype=dtype),
            a_log=tensor(32, dtype=torch.float32),
            dt_bias=tensor(32, dtype=torch.float32),
        )
        norm = GatedNorm(
            z=tensor(num_tokens, 32, 128, dtype=dtype), weight=tensor(128, dtype=dtype), eps=1e-6
        )
        states = tensor(64, 32, 128, 128, dtype=state_dtype)
        values = values.unflatten(1, (32, 128))
        delta_rule(keys[:, 0], keys[:, 1], values, gates, norm, states, segments)
        scan_gates = ScanGates(
            dt=gates.a, a_log=gates.a_log, dt_bias=gates.dt_bias, d=tensor(32, dtype=torch.float32)
        )
        groups = mixed[:, 4096:6144].unflatten(1, (2, 8, 128))
        x = mixed[:, :2048].unflatten(1, (32, 64))
        scan_states = tensor(64, 32, 64, 128, dtype=state_dtype)
        selective_scan(x, groups[:, 0], groups[:, 1], scan_gates, scan_states, segments)


def drafts() -> None:
    for num_rows in (1, 8):
        numbers = tensor(num_rows, dtype=torch.int64)
        chosen = tensor(num_rows * 5, dtype=torch.int64)
        table, words = tensor(8, 64, dtype=torch.int64), tensor(2048, dtype=torch.int64)
        for places in (chosen, chosen[:0]):
            begun = BegunDrafts(*(places,) * 3, *(numbers,) * 7, tensor(num_rows, 128, dtype=INT))
            step = chosen, chosen
            begin_drafts(begun, words, step, table, block_size=16, max_num_drafts=4)
        drafts = chosen.view(num_rows, 5)
        publish_drafts(drafts, table, numbers, drafts, words, begun)
        key_drafts(numbers, starts=numbers, positions=numbers, number=2)
        place_drafts(
            numbers,
            numbers,
            tensor(num_rows * 33, 2 * NUM_ITEM_WORDS, dtype=INT),
            positions=numbers,
            num_slots=numbers,
            tables=tensor(num_rows, 128, dtype=INT),
            number=2,
            last_position=8191,
            block_size=16,
            tile_keys=64,
        )


LAUNCHES: dict[str, Callable[[], None]] = {
    "experts": partial(experts, BF16),
    "experts float16": partial(experts, torch.float16),
    "experts float32": partial(experts, torch.float32),
    "experts mxfp4": mxfp4_experts,
    "experts, no gates": experts_without_gates,
    "persistent, gated": many_gated_rows,
    "persistent, rotated": many_rotated_rows,
    "fp8 tiles": fp8_tiles,
    "skinny": partial(skinny, None),
    "skinny fp8": partial(skinny, 4096),
    "skinny fp8, blocks": partial(skinny, 128),
    "row": partial(row, "plain"),
    "row, layer": layer_of_one_row,
    "row, fp8": partial(row, "fp8"),
    "row, fp8 blocks": partial(row, "fp8 blocks"),
    "row, int4": partial(row, "int4"),
    "fp8 blocks": blocks,
    "int4": partial(int4, 128),
    "int4, groups of 32": partial(int4, 32),
    "quantized rows": quantized,
    "attention": partial(attention, has_sinks=False),
    "attention, fp8 cache": partial(attention, has_sinks=False, cache_type=FP8),
    "attention, sinks": partial(attention, has_sinks=True),
    "attention, sinks, windows, 64": partial(
        attention, has_sinks=True, head_size=64, num_heads=64, window_left=127
    ),
    "rows": rows,
    "drafts": drafts,
    "sums over ranks": sums_over_ranks,
    "recurrent": partial(recurrent, BF16, torch.float32),
    "recurrent bfloat16": partial(recurrent, BF16, BF16),
}
