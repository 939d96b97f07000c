"""Flags of several commands: a table of the engine's, one for each `EngineOptions` field, and
those of sampling."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, get_args

from cluster.engine.options import EngineOptions
from pagedray.config import Device, Dtype, KVCacheDtype, LoadFormat, PlacementStrategy, Preemption
from pagedray.request import SamplingParams

if TYPE_CHECKING:
    import argparse

__all__ = ["add_engine_flags", "add_sampling_flags", "engine_options", "sampling_params"]


@dataclass(frozen=True, slots=True)
class _Flag:
    """A field of `EngineOptions` as a flag; its default is the field's."""

    field: str
    help: str
    """`%(default)s` stands for the default."""
    kind: type | tuple[str, ...] = str
    """The type of its value, or its allowed values."""
    metavar: str | None = "N"


_GROUPS = {
    "model": (
        _Flag(
            "dtype",
            "Data type of weights and activations (default: the checkpoint's).",
            get_args(Dtype),
        ),
        _Flag(
            "load_format",
            "auto loads the checkpoint's weights, dummy initializes random ones "
            "(default: %(default)s).",
            get_args(LoadFormat),
        ),
        _Flag("load_seed", "Random seed of dummy weights (default: %(default)s).", int),
        _Flag(
            "max_model_len",
            "Context length: prompt and output tokens of a sequence (default: the model's).",
            int,
        ),
        _Flag(
            "attention_backend",
            "Attention backend; auto selects one (default: %(default)s).",
            str,
            "NAME",
        ),
        _Flag(
            "enforce_eager",
            "Disable CUDA graphs, which saves GPU memory and slows decoding.",
            bool,
        ),
    ),
    "ranks": (
        _Flag(
            "tensor_parallel_size",
            "Number of ranks, one per device, that the model is split over (default: %(default)s).",
            int,
        ),
        _Flag(
            "device",
            "Device of the ranks (default: cuda if this machine has an NVIDIA GPU, else cpu).",
            get_args(Device),
        ),
        _Flag(
            "executor",
            "ray runs each rank as a Ray actor, local runs a single rank in this process "
            "(default: ray; of generate and chat with a single rank, local).",
            ("ray", "local"),
        ),
        _Flag(
            "num_threads", "CPU threads per rank (default: an equal share of the CPU cores).", int
        ),
        _Flag(
            "placement_strategy",
            "Ray placement strategy of the ranks; STRICT_PACK keeps them on one node "
            "(default: %(default)s).",
            get_args(PlacementStrategy),
        ),
    ),
    "KV cache": (
        _Flag("block_size", "Tokens per block, 1 to 256 (default: %(default)s).", int),
        _Flag("num_blocks", "Blocks on the device (default: as many as fit in memory).", int),
        _Flag(
            "num_cpu_blocks",
            "Blocks in CPU memory, for swapped-out sequences (default: up to 1 GiB).",
            int,
        ),
        _Flag(
            "memory_fraction",
            "Fraction of the device memory to use for weights, activations and KV cache "
            "(default: %(default)s).",
            float,
            "FRACTION",
        ),
        _Flag(
            "enable_prefix_cache",
            "Disable prefix caching: sequences do not share the blocks of a common prefix.",
            bool,
        ),
        _Flag(
            "kv_cache_dtype",
            "Data type of keys and values; auto is that of the model (default: %(default)s).",
            get_args(KVCacheDtype),
        ),
    ),
    "scheduling": (
        _Flag("max_num_seqs", "Maximum number of sequences per step (default: %(default)s).", int),
        _Flag(
            "max_num_batched_tokens",
            "Maximum number of tokens per step (default: %(default)s).",
            int,
        ),
        _Flag(
            "max_queued_requests",
            "Maximum number of waiting requests; further ones are rejected (default: %(default)s).",
            int,
        ),
        _Flag(
            "max_queued_tokens",
            "Maximum number of prompt tokens in waiting requests; further requests are rejected "
            "(default: %(default)s).",
            int,
        ),
        _Flag(
            "preemption",
            "How a sequence is preempted: swapped to CPU blocks, recomputed later, or whichever is "
            "cheaper (default: %(default)s).",
            get_args(Preemption),
        ),
        _Flag(
            "structure_compile_s",
            "CPU time limit for compiling one JSON schema, regular expression or grammar "
            "(default: %(default)s).",
            float,
            "SECONDS",
        ),
    ),
}


def add_engine_flags(parser: argparse.ArgumentParser, *, executor: str | None) -> None:
    """Add the engine's flags to a command; without `executor`, the number of ranks decides it."""
    default = EngineOptions()
    for title, flags in _GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            _add(group, flag, getattr(default, flag.field))
    parser.set_defaults(executor=executor)


def engine_options(parsed: argparse.Namespace) -> EngineOptions:
    """Return the options that the flags state."""
    given = {field.name: getattr(parsed, field.name) for field in fields(EngineOptions)}
    if given["executor"] is None:
        given["executor"] = "local" if given["tensor_parallel_size"] == 1 else "ray"
    return EngineOptions(**given)


def add_sampling_flags(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Add the flags that `sampling_params` reads to a command."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=int,
        default=max_tokens,
        metavar="N",
        help="Maximum number of tokens to generate (default: %(default)s).",
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="Sampling temperature; 0 is greedy (default: %(default)s).",
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="Sample from the likeliest tokens whose probabilities add up to P "
        "(default: %(default)s).",
    )
    group.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="Sample from the K likeliest tokens; 0 is all (default: %(default)s).",
    )
    group.add_argument(
        "--seed", type=int, metavar="N", help="Random seed of sampling (default: a random one)."
    )


def sampling_params(parsed: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters that the flags state."""
    return SamplingParams(
        max_tokens=parsed.max_tokens,
        temperature=parsed.temperature,
        top_p=parsed.top_p,
        top_k=parsed.top_k,
        seed=parsed.seed,
    )


def _add(group: argparse._ArgumentGroup, flag: _Flag, default: object) -> None:
    name = f"--{flag.field.replace('_', '-')}"
    # Any: argparse takes other arguments for each kind of flag.
    more: dict[str, Any] = {"dest": flag.field, "help": flag.help}
    if default is True:
        name = name.replace("--enable-", "--no-")
        more["action"] = "store_false"
    elif flag.kind is bool:
        more["action"] = "store_true"
    elif isinstance(flag.kind, tuple):
        more |= {"choices": flag.kind, "default": default}
    else:
        more |= {"type": flag.kind, "default": default, "metavar": flag.metavar}
    group.add_argument(name, **more)
