"""Causal convolutions, delta rules and selective scans on the CPU."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attention.kernels.cpu.native import load_kernels

if TYPE_CHECKING:
    from attention.kernels.arguments import GatedNorm, RuleTokens, Segments

__all__ = ["causal_conv", "rule"]

_SUFFIXES = {torch.float32: "float", torch.bfloat16: "bfloat"}
_MAX_WIDTH, _MAX_KEY_SIZE = 4, 512
"""Limits of the kernels."""
_ADDRESS, _NUMBER = ctypes.c_void_p, ctypes.c_int64


class _Rule(ctypes.Structure):
    """The arguments of a rule, as recurrent_steps_body.h declares them."""

    _fields_ = (
        *((name, _ADDRESS) for name in ("query", "key", "value", "z")),
        *((name, _ADDRESS) for name in ("log_decay", "beta", "skip", "weight", "states")),
        *((name, _ADDRESS) for name in ("query_starts", "rows", "out")),
        *((name, _NUMBER) for name in ("query_stride", "key_stride", "value_stride", "z_stride")),
        *((name, _NUMBER) for name in ("row_stride", "num_segments", "num_key_heads", "num_heads")),
        *((name, _NUMBER) for name in ("key_size", "value_size", "is_chained", "keeps_states")),
        *((name, ctypes.c_float) for name in ("scale", "eps")),
    )


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    segments: Segments,
    *,
    has_silu: bool,
) -> torch.Tensor | None:
    """Return the convolution of each segment, or None if the kernel does not support it."""
    kernel = _kernel("causal_conv", x.dtype)
    num_channels, width = weight.shape
    parts = [weight] if bias is None else [weight, bias]
    if kernel is None or width > _MAX_WIDTH or any(part.dtype != x.dtype for part in parts):
        return None
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert states.dtype == x.dtype
    assert states.stride()[1:] == (num_channels, 1)
    out = x.new_zeros(x.shape)
    kernel(
        _ADDRESS(x.data_ptr()),
        _NUMBER(x.stride(0)),
        _ADDRESS(weight.data_ptr()),
        _ADDRESS(None if bias is None else bias.data_ptr()),
        _ADDRESS(states.data_ptr()),
        _NUMBER(states.stride(0)),
        _ADDRESS(segments.query_starts.data_ptr()),
        _ADDRESS(segments.rows.data_ptr()),
        _ADDRESS(out.data_ptr()),
        _NUMBER(len(segments.rows)),
        _NUMBER(num_channels),
        _NUMBER(width),
        ctypes.c_int(has_silu),
        ctypes.c_int(segments.keeps_states),
    )
    return out


def rule(
    tokens: RuleTokens,
    skip: torch.Tensor | None,
    norm: GatedNorm | None,
    states: torch.Tensor,
    segments: Segments,
    out: torch.Tensor,
) -> bool:
    """Write the results of all segments; return whether the kernel supports the rule.

    With `skip`, the factors `[num_heads]` float32 of inputs that are added to the results, it is a
    selective scan, otherwise a delta rule. `out` is `[num_tokens, num_heads, value_size]`, of the
    dtype of the values, and becomes the gated norm if there is a norm.
    """
    query, key, value, log_decay, beta = tokens
    num_heads, value_size, key_size = states.shape[1:]
    suffix = _SUFFIXES.get(states.dtype)
    kernel = _kernel(f"rule_{suffix}_states", value.dtype)
    if kernel is None or suffix is None or key_size > _MAX_KEY_SIZE:
        return False
    parts = ((query, key_size), (key, key_size), (value, value_size))
    assert all(part.stride()[1:] == (size, 1) for part, size in parts)
    assert states.stride()[1:] == (value_size * key_size, key_size, 1)
    assert out.is_contiguous()
    log_decay, beta = log_decay.contiguous(), beta.contiguous()
    assert skip is None or skip.dtype == torch.float32
    weight = None if norm is None else norm.weight.float()
    z = None if norm is None else norm.z
    assert z is None or z.stride()[1:] == (value_size, 1)
    arguments = _Rule(
        query=query.data_ptr(),
        key=key.data_ptr(),
        value=value.data_ptr(),
        z=None if z is None else z.data_ptr(),
        log_decay=log_decay.data_ptr(),
        beta=beta.data_ptr(),
        skip=None if skip is None else skip.data_ptr(),
        weight=None if weight is None else weight.data_ptr(),
        states=states.data_ptr(),
        query_starts=segments.query_starts.data_ptr(),
        rows=segments.rows.data_ptr(),
        out=out.data_ptr(),
        query_stride=query.stride(0),
        key_stride=key.stride(0),
        value_stride=value.stride(0),
        z_stride=0 if z is None else z.stride(0),
        row_stride=states.stride(0),
        num_segments=len(segments.rows),
        num_key_heads=key.shape[1],
        num_heads=num_heads,
        key_size=key_size,
        value_size=value_size,
        is_chained=segments.is_chained,
        keeps_states=segments.keeps_states,
        scale=key_size**-0.5,
        eps=0.0 if norm is None else norm.eps,
    )
    kernel(ctypes.byref(arguments))
    return True


@cache
def _kernel(name: str, dtype: torch.dtype) -> ctypes._NamedFuncPointer | None:
    library = load_kernels(Path(__file__).with_suffix(".c")) if dtype in _SUFFIXES else None
    if library is None:
        return None
    kernel = library[f"{name}_{_SUFFIXES[dtype]}"]
    kernel.restype = None
    return kernel
