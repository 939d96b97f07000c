"""Computes one layer of torch_sdpa on a CPU, given a plan.

Keys and values are not repeated for the query heads of a KV head: in a decode these heads are the
queries of one call, and in a span they share one expanded view.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from attention.cpu.decode import DecodeChunk, Gather
from attention.cpu.plan import LayerPlan, Prompts, Span
from attention.params import KV_CACHE_DTYPES, AttentionParams

__all__ = ["LayerRunner"]

_LENGTH_STEP = 32


class LayerRunner:
    """Runs the parts of a plan for a layer."""

    def __init__(self, params: AttentionParams, sinks: torch.Tensor | None) -> None:
        """`sinks` is `[num_heads]` float32, or None."""
        self._params = params
        self.sinks = sinks
        self._chunk_sinks = self._span_sinks = None
        if sinks is not None:
            heads = (params.num_kv_heads, params.num_queries_per_kv)
            self._chunk_sinks, self._span_sinks = sinks.view(1, *heads, 1), sinks.view(*heads, 1, 1)
        # Keys and values of an fp8 cache are read without their scales. Scaling the scores and the
        # results instead takes fewer multiplications.
        is_fp8 = params.is_cached and KV_CACHE_DTYPES[params.kv_cache_dtype] is not None
        self._scale = params.scale * params.k_scale if is_fp8 else params.scale
        self._value_scale = params.v_scale if is_fp8 else 1.0
        self._query_shape = (-1, params.num_kv_heads, params.num_queries_per_kv, params.head_size)
        self._kv_shape = (-1, params.num_kv_heads, params.head_size)

    def run_plan(
        self,
        plan: LayerPlan,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        blocks: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attend for all queries that torch computes."""
        for prompts in plan.prompts:
            assert key is not None
            assert value is not None
            self.run_prompts(prompts, query, key, value, out)
        for span in plan.spans:
            self.run_span(span, query, key, value, blocks, out)
        if plan.chunks:
            self.run_chunks(plan.chunks, query, blocks, out)

    def run_chunks(
        self,
        chunks: Sequence[DecodeChunk],
        query: torch.Tensor,
        blocks: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attend for decodes; the query heads of a KV head are the queries of one call."""
        query, out = query.view(self._query_shape), out.view(self._query_shape)
        for start, stop, tokens, gather, bias in chunks:
            keys, values = gather.read_blocks(blocks)
            if tokens is None:
                result = self._attend(query[start:stop], keys, values, bias, self._chunk_sinks)
                out[start:stop].copy_(result)
            else:
                selected = query.index_select(0, tokens)
                result = self._attend(selected, keys, values, bias, self._chunk_sinks)
                out.index_copy_(0, tokens, result)

    def run_span(
        self,
        span: Span,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        blocks: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attend for one sequence, tile by tile; KV heads are the batch of each call."""
        if isinstance(span.keys, Gather):
            keys, values = (t[0].unsqueeze(1) for t in span.keys.read_blocks(blocks))
        else:
            assert key is not None
            assert value is not None
            keys, values = (
                t[span.keys].view(self._kv_shape).transpose(0, 1).unsqueeze(1) for t in (key, value)
            )
        queries = query.view(self._query_shape).permute(1, 2, 0, 3)
        outs = out.view(self._query_shape).permute(1, 2, 0, 3)
        for tile in span.tiles:
            tokens = slice(tile.query_start, tile.query_stop)
            seen = slice(tile.key_start, tile.key_stop)
            result = self._attend(
                queries[:, :, tokens],
                keys[:, :, seen],
                values[:, :, seen],
                tile.bias,
                self._span_sinks,
            )
            outs[:, :, tokens].copy_(result)

    def run_prompts(
        self,
        prompts: Prompts,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attend for prompts of equal length in one call."""
        tokens = slice(prompts.start, prompts.start + prompts.num_prompts * prompts.num_tokens)
        params = self._params
        leading = (prompts.num_prompts, prompts.num_tokens)
        query, out = (
            t[tokens].view(*leading, params.num_heads, params.head_size).transpose(1, 2)
            for t in (query, out)
        )
        key, value = (
            t[tokens].view(*leading, params.num_kv_heads, params.head_size).transpose(1, 2)
            for t in (key, value)
        )
        num_spare = -prompts.num_tokens % _LENGTH_STEP
        if num_spare and params.is_causal and query.dtype == torch.bfloat16:
            # oneDNN keeps code for each length; causal queries do not see the padding after them.
            query, key, value = (pad(t, (0, 0, 0, num_spare)) for t in (query, key, value))
        result = scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=params.is_causal,
            scale=self._scale,
            enable_gqa=params.num_heads != params.num_kv_heads,
        )
        out.copy_(self._scaled(result)[:, :, : prompts.num_tokens])

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        bias: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend from `[batch, heads, queries, head_size]`; one head of keys broadcasts to all."""
        # Torch has no kernel with a soft cap or with sinks.
        if not self._params.has_plain_softmax:
            return self._scaled(self._attend_explicitly(query, keys, values, bias, sinks))
        if keys.shape[1] != query.shape[1]:
            shape = (-1, query.shape[1], -1, -1)
            keys, values = keys.expand(shape), values.expand(shape)
        result = scaled_dot_product_attention(
            query, keys, values, attn_mask=bias, scale=self._scale
        )
        return self._scaled(result)

    def _scaled(self, result: torch.Tensor) -> torch.Tensor:
        """Return a result multiplied by the scale of cached values."""
        return result if self._value_scale == 1.0 else result.mul_(self._value_scale)

    def _attend_explicitly(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        bias: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend by computing all scores in float32."""
        batch, num_heads, num_queries, head_size = query.shape
        # Query heads that share a KV head are rows of one matrix product.
        rows = query.float().reshape(batch, keys.shape[1], -1, head_size)
        scores = torch.matmul(rows, keys.float().transpose(2, 3)).mul_(self._scale)
        cap = self._params.soft_cap
        if cap is not None:
            scores.div_(cap).tanh_().mul_(cap)
        scores = scores.view(batch, num_heads, num_queries, -1)
        if bias is not None:
            scores.add_(bias)
        if sinks is not None:
            scores = torch.cat((scores, sinks.expand(*scores.shape[:3], 1)), dim=-1)
        # The weight of a sink is dropped.
        probabilities = torch.softmax(scores, dim=-1)[..., : keys.shape[2]]
        probabilities = probabilities.reshape(batch, keys.shape[1], -1, keys.shape[2])
        result = torch.matmul(probabilities, values.float())
        return result.view(query.shape).to(query.dtype)
