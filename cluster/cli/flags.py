"""Flags of several commands: a table of the engine's, one for each `EngineOptions` field, and
those of sampling."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, get_args

from cluster.engine.options import EngineOptions
from cluster.engine.vllm_options import context_length, own_value
from pagedray.config import (
    AllReduce,
    Device,
    KVCacheDtype,
    LoadFormat,
    MessageSpecialTokens,
    PlacementStrategy,
    Preemption,
    QuantizationMethod,
)
from pagedray.errors import StartupError
from pagedray.model_config import Dtype, Task
from pagedray.request import SamplingParams

__all__ = ["add_engine_flags", "add_sampling_flags", "engine_options", "sampling_fields"]


@dataclass(frozen=True, slots=True)
class _Flag:
    """A field of `EngineOptions` as a flag; its default is the field's."""

    field: str
    help: str
    """Names the default only where the parser cannot: None, which selects one."""
    kind: type | tuple[str, ...] | Callable[[str], object] = str
    """The type of its value, or its allowed values."""
    metavar: str | None = "N"
    aliases: tuple[str, ...] = ()
    """Names of the same flag in vLLM."""


class _OptionalChoices(tuple[str, ...]):
    """Allowed values of a flag whose default is None, which some of vLLM's values are."""

    __slots__ = ()

    def __contains__(self, value: object) -> bool:
        return value is None or super().__contains__(value)


def _length(text: str) -> int | None:
    try:
        return context_length(text)
    except StartupError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


_GROUPS = {
    "model": (
        _Flag(
            "dtype",
            "Data type of weights and activations. (default: the checkpoint's)",
            get_args(Dtype),
        ),
        _Flag(
            "quantization",
            "fp8 quantizes plain weights when they are loaded; others name the format of a "
            "quantized checkpoint. (default: as the checkpoint says)",
            get_args(QuantizationMethod),
            aliases=("-q",),
        ),
        _Flag(
            "load_format",
            "auto loads the checkpoint's weights, dummy initializes random ones.",
            get_args(LoadFormat),
        ),
        _Flag("load_seed", "Random seed of dummy weights.", int),
        _Flag(
            "message_special_tokens",
            "Special tokens that clients write in chat messages: text encodes them as ordinary "
            "text, parse as special tokens, which lets clients forge roles.",
            get_args(MessageSpecialTokens),
        ),
        _Flag(
            "trust_request_chat_template",
            "Take the chat_template of requests, a program that renders their prompt in a sandbox.",
            bool,
        ),
        _Flag(
            "max_model_len",
            "Context length in tokens, such as 32768 or 32K. (default: the model's)",
            _length,
        ),
        _Flag(
            "task",
            "generate; embed, which makes vectors of texts for Embed and /v1/embeddings; or score, "
            "which compares texts for /v1/rerank and /score. (default: score for a cross-encoder, "
            "embed for other encoders and with modules.json)",
            get_args(Task),
        ),
        _Flag(
            "generation_config",
            "Where requests take temperature, top_p, top_k, min_p and repetition_penalty from if "
            "they do not set them: auto is the model's generation_config.json, none is no file.",
            str,
            "FOLDER",
        ),
        _Flag("attention_backend", "Attention backend; auto selects one.", str, "NAME"),
        _Flag("enforce_eager", "Disable CUDA graphs, which saves memory and slows decoding.", bool),
        _Flag(
            "max_graph_tokens",
            "Largest step with prompts, in tokens, that runs as CUDA graphs; 0 disables them for "
            "such steps.",
            int,
        ),
    ),
    "ranks": (
        _Flag(
            "tensor_parallel_size",
            "Ranks, one per device, that share the model.",
            int,
            aliases=("-tp",),
        ),
        _Flag(
            "device",
            "Device of the ranks. (default: cuda if there is an NVIDIA GPU, else cpu)",
            get_args(Device),
        ),
        _Flag(
            "enable_expert_parallel",
            "Shard experts over the ranks as a whole, instead of some columns of each.",
            bool,
        ),
        _Flag(
            "executor",
            "ray runs each rank as a Ray actor, local a single rank in this process; for a single "
            "rank, generate and chat default to local.",
            ("ray", "local"),
            aliases=("--distributed-executor-backend",),
        ),
        _Flag("num_threads", "CPU threads per rank. (default: an equal share of the cores)", int),
        _Flag(
            "placement_strategy",
            "Ray placement strategy of the ranks; STRICT_PACK is a single node.",
            get_args(PlacementStrategy),
        ),
        _Flag(
            "spare_ranks",
            "Spare processes on each node, which replace a rank that dies within less time. "
            "(default: 1 on GPUs, 0 on CPUs)",
            int,
        ),
        _Flag(
            "all_reduce",
            "What sums rows over the GPUs of a node: auto, a single kernel that also adds "
            "and norms, or nccl, to which auto falls back.",
            get_args(AllReduce),
        ),
        _Flag(
            "allow_unauthenticated_ray",
            "Start Ray although RAY_AUTH_MODE=disabled lets every user of this machine run code "
            "through it.",
            bool,
        ),
    ),
    "KV cache": (
        _Flag("block_size", "Tokens per block, 1 to 256.", int),
        _Flag(
            "num_blocks",
            "Blocks on the device. (default: as many as fit in memory)",
            int,
            aliases=("--num-gpu-blocks-override",),
        ),
        _Flag(
            "num_cpu_blocks",
            "CPU blocks for swapping and for prefixes that have no room on the device. (default: "
            "up to 1 GiB, or beside GPUs a quarter of the available memory for all ranks)",
            int,
        ),
        _Flag(
            "memory_fraction",
            "Fraction of device memory for weights, activations and KV cache.",
            float,
            "FRACTION",
            ("--gpu-memory-utilization",),
        ),
        _Flag("enable_prefix_cache", "Disable prefix caching.", bool),
        _Flag(
            "enable_cpu_prefix_cache",
            "Do not keep prefixes in the CPU blocks when they have no room on the device.",
            bool,
        ),
        _Flag(
            "enable_kept_cpu_pool",
            "Keep the CPU blocks in memory of the rank that uses them, so that prefixes there are "
            "gone when the rank is replaced.",
            bool,
        ),
        _Flag(
            "cpu_pool_checksums",
            "Compute checksums of the CPU blocks, and drop those that are not as they were when a "
            "rank is replaced.",
            bool,
        ),
        _Flag(
            "disk_cache_folder",
            "Keep prefixes that the CPU blocks have no room for in files in this folder, which "
            "should be on a fast local disk. (default: nowhere)",
            str,
            "FOLDER",
        ),
        _Flag(
            "disk_cache_bytes",
            "Most bytes that all ranks together keep there.",
            int,
        ),
        _Flag(
            "kv_cache_dtype",
            "Data type of keys and values; auto is the model's.",
            get_args(KVCacheDtype),
        ),
    ),
    "scheduling": (
        _Flag(
            "max_num_seqs",
            "Maximum number of sequences per step. (default: 256, or 1024 on GPUs of 70 GiB or "
            "more)",
            int,
        ),
        _Flag("max_num_batched_tokens", "Maximum number of tokens per step.", int),
        _Flag(
            "max_queued_requests", "Maximum number of waiting requests; others are rejected.", int
        ),
        _Flag(
            "max_queued_tokens",
            "Maximum number of waiting prompt tokens; more are rejected.",
            int,
        ),
        _Flag(
            "preemption",
            "Whether preempted sequences are swapped to CPU blocks or recomputed; auto is the "
            "cheaper one.",
            get_args(Preemption),
        ),
        _Flag(
            "itl_target_ms",
            "Time between tokens that prompts should not make longer: chunks of them follow what "
            "steps are measured to take. (default: no limit)",
            float,
            "MS",
        ),
        _Flag(
            "structure_compile_s",
            "CPU time limit for compiling a JSON schema, regular expression or grammar.",
            float,
            "SECONDS",
        ),
    ),
}
_SAMPLING = (
    _Flag("max_tokens", "Maximum number of tokens to generate.", int),
    _Flag(
        "temperature",
        "Sampling temperature; 0 is greedy. (default: that of --generation-config, or 0)",
        float,
        "T",
    ),
    _Flag(
        "top_p",
        "Sample from the likeliest tokens of this total probability. (default: that of "
        "--generation-config, or 1)",
        float,
        "P",
    ),
    _Flag(
        "top_k",
        "Sample from this many of the likeliest tokens; 0 or -1 is all. (default: that of "
        "--generation-config, or 0)",
        int,
        "K",
    ),
    _Flag("seed", "Random seed of sampling. (default: a random one)", int),
)


def add_engine_flags(parser: argparse.ArgumentParser, *, executor: str | None) -> None:
    """Add the engine's flags to a command; without `executor`, the number of ranks decides it."""
    default = EngineOptions()
    for title, flags in _GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            _add(group, flag, getattr(default, flag.field))
    parser.set_defaults(executor=executor)


def engine_options(parsed: argparse.Namespace) -> EngineOptions:
    given = {field.name: getattr(parsed, field.name) for field in fields(EngineOptions)}
    if given["executor"] is None:
        given["executor"] = "local" if given["tensor_parallel_size"] == 1 else "ray"
    return EngineOptions(**given)


def add_sampling_flags(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Add the flags that `sampling_fields` reads to a command."""
    group = parser.add_argument_group("sampling")
    for flag in _SAMPLING:
        _add(group, flag, max_tokens if flag.field == "max_tokens" else None)


def sampling_fields(parsed: argparse.Namespace) -> dict[str, Any]:  # Any: fields of all types
    """Return the sampling parameters that the command line sets.

    Raises InvalidRequestError for a value that is not allowed.
    """
    given = {flag.field: getattr(parsed, flag.field) for flag in _SAMPLING}
    fields = {name: value for name, value in given.items() if value is not None}
    SamplingParams(**fields)
    return fields


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
        choices = flag.kind if default is not None else _OptionalChoices(flag.kind)
        more |= {"choices": choices, "default": default, "type": _translation(flag.field)}
        more["metavar"] = f"{{{','.join(flag.kind)}}}"
    else:
        kind = _translation(flag.field) if flag.kind is str else flag.kind
        more |= {"type": kind, "default": default, "metavar": flag.metavar}
    group.add_argument(name, *flag.aliases, **more)


def _translation(field: str) -> Callable[[str], object]:
    """Return a converter of vLLM's values of a flag to ours."""
    return lambda text: own_value(field, text)
