"""The command-line flags of an engine: a table, one line for each field of `EngineOptions`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, get_args

from cluster.engine.options import EngineOptions
from pagedray.config import Device, Dtype, KVCacheDtype, LoadFormat, PlacementStrategy, Preemption

if TYPE_CHECKING:
    import argparse

__all__ = ["add_engine_flags", "engine_options"]


@dataclass(frozen=True, slots=True)
class _Flag:
    """A field of `EngineOptions` as a flag; its default is the field's."""

    field: str
    help: str
    """`(%(default)s)` is the default's place."""
    kind: type | tuple[str, ...] = str
    """The type of its value, or the values to choose from."""
    metavar: str | None = "N"


_GROUPS = {
    "ranks": (
        _Flag("tensor_parallel_size", "ranks that share the model (%(default)s)", int),
        _Flag("device", "where ranks run (cuda if there is one)", get_args(Device)),
        _Flag("executor", "ray: actors; local: one rank in this process", ("ray", "local")),
        _Flag("num_threads", "CPU threads of a rank (its share of cores)", int),
        _Flag(
            "placement_strategy",
            "how Ray places the ranks (%(default)s: on one node)",
            get_args(PlacementStrategy),
        ),
        _Flag("dtype", "type of weights (the checkpoint's own)", get_args(Dtype)),
        _Flag(
            "load_format",
            "dummy: random weights, no tensor is read (%(default)s)",
            get_args(LoadFormat),
        ),
        _Flag("load_seed", "seed of dummy weights (%(default)s)", int),
        _Flag("attention_backend", "a backend's name, or auto (%(default)s)", str, "NAME"),
        _Flag("enforce_eager", "capture no steps in CUDA graphs", bool),
    ),
    "KV cache": (
        _Flag("block_size", "tokens per block (%(default)s)", int, "B"),
        _Flag("num_blocks", "blocks on the device (what fits)", int),
        _Flag("num_cpu_blocks", "blocks to swap to (up to 1 GiB)", int),
        _Flag("memory_fraction", "part of the device's memory to use (%(default)s)", float, "F"),
        _Flag("enable_prefix_cache", "do not share blocks between equal beginnings", bool),
        _Flag("kv_cache_dtype", "type of keys and values (%(default)s)", get_args(KVCacheDtype)),
    ),
    "scheduling": (
        _Flag("max_num_seqs", "sequences in a step (%(default)s)", int),
        _Flag("max_num_batched_tokens", "tokens in a step (%(default)s)", int),
        _Flag("max_model_len", "tokens in a sequence (what the model allows)", int),
        _Flag("max_queued_requests", "requests that may wait (%(default)s)", int),
        _Flag("max_queued_tokens", "prompt tokens that may wait (%(default)s)", int),
        _Flag("preemption", "how a sequence makes room (%(default)s)", get_args(Preemption)),
        _Flag(
            "structure_compile_s",
            "CPU time to compile a schema or grammar (%(default)s)",
            float,
            "S",
        ),
    ),
}


def add_engine_flags(parser: argparse.ArgumentParser, *, executor: str | None) -> None:
    """Give a command the engine's flags; without `executor`, the number of ranks decides it."""
    default = EngineOptions()
    for title, flags in _GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            _add(group, flag, getattr(default, flag.field))
    parser.set_defaults(executor=executor)


def engine_options(parsed: argparse.Namespace) -> EngineOptions:
    """Return what the flags say."""
    given = {field.name: getattr(parsed, field.name) for field in fields(EngineOptions)}
    if given["executor"] is None:
        given["executor"] = "local" if given["tensor_parallel_size"] == 1 else "ray"
    return EngineOptions(**given)


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
