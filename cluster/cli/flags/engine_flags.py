"""The flags of the engine: a table with one for each field of `EngineOptions`."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from typing import TYPE_CHECKING, get_args

from cluster.cli.flags.flag import Flag, MergedObject, add_flag
from cluster.cli.flags.flag_values import read_object
from cluster.engine.options.engine_options import EngineOptions
from cluster.engine.options.vllm_options import context_length
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

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["add_engine_flags", "engine_options"]


def _length(text: str) -> int | None:
    try:
        return context_length(text)
    except StartupError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


_GROUPS = {
    "model": (
        Flag(
            "dtype",
            "Data type of weights and activations. (default: the checkpoint's)",
            get_args(Dtype),
        ),
        Flag(
            "quantization",
            "fp8 quantizes plain weights while they are loaded; the other values name the "
            "format of a quantized checkpoint. (default: read from the checkpoint)",
            get_args(QuantizationMethod),
            aliases=("-q",),
        ),
        Flag(
            "load_format",
            "auto loads the weights of the checkpoint; dummy initializes random weights.",
            get_args(LoadFormat),
        ),
        Flag("load_seed", "Random seed of dummy weights.", int),
        Flag(
            "message_special_tokens",
            "How special tokens in the chat messages of clients are encoded: text encodes "
            "them as ordinary text; parse encodes them as special tokens, which lets "
            "clients forge roles.",
            get_args(MessageSpecialTokens),
        ),
        Flag(
            "chat_template",
            "File with a Jinja chat template, or the template itself, that replaces the model's.",
            str,
            "TEMPLATE",
        ),
        Flag(
            "trust_request_chat_template",
            "Accept chat_template in requests: clients may send Jinja templates, which are "
            "programs that run in a sandbox.",
            bool,
        ),
        Flag(
            "max_model_len",
            "Context length in tokens, such as 32768 or 32K. (default: the model's)",
            _length,
        ),
        Flag(
            "task",
            "What the model does: generate text; embed texts for Embed and /v1/embeddings; "
            "or score pairs of texts for /v1/rerank and /score. (default: score for a "
            "cross-encoder, embed for other encoders and for models with modules.json, "
            "otherwise generate)",
            get_args(Task),
        ),
        Flag(
            "generation_config",
            "Source of temperature, top_p, top_k, min_p and repetition_penalty for "
            "requests that do not set them: auto reads the model's generation_config.json, "
            "none reads no file.",
            str,
            "FOLDER",
        ),
        Flag(
            "override_generation_config",
            "JSON object of these parameters, such as '{\"temperature\": 0.6}', which takes "
            "precedence over the file.",
            read_object,
            "JSON",
        ),
        Flag(
            "hf_overrides",
            'JSON object of fields that replace those of config.json, such as \'{"rope_scaling": '
            '{"rope_type": "yarn", "factor": 4.0}}\'.',
            read_object,
            "JSON",
        ),
        Flag(
            "revision",
            "Branch, tag or commit of a model on the Hub, as in ORG/NAME@REVISION.",
            metavar="REVISION",
        ),
        Flag(
            "download_dir",
            "Folder of the Hub's cache on each node. (default: that of HF_HOME)",
            metavar="FOLDER",
        ),
        Flag("tokenizer", argparse.SUPPRESS),
        Flag("tokenizer_revision", argparse.SUPPRESS),
        Flag("seed", "Random seed of requests that have no seed. (default: random)", int),
        Flag(
            "attention_backend",
            "Attention backend: auto, hybrid, torch_sdpa, flashinfer or xformers; auto selects "
            "the fastest one that supports the model and the device.",
            str,
            "NAME",
        ),
        Flag("enforce_eager", "Disable CUDA graphs, which saves memory and slows decoding.", bool),
        Flag(
            "max_graph_tokens",
            "Maximum number of tokens in a step with prompts that runs as CUDA graphs; 0 "
            "disables graphs for steps with prompts.",
            int,
        ),
    ),
    "ranks": (
        Flag(
            "tensor_parallel_size",
            "Number of ranks, one per device, that the model is sharded over.",
            int,
            aliases=("-tp",),
        ),
        Flag(
            "device",
            "Device of the ranks. (default: cuda if there is an NVIDIA GPU, else cpu)",
            get_args(Device),
        ),
        Flag(
            "enable_expert_parallel",
            "Give each rank some whole experts, instead of some columns of every expert.",
            bool,
            aliases=("-ep",),
        ),
        Flag(
            "executor",
            "ray runs each rank as a Ray actor; local runs a single rank in this process.",
            ("ray", "local"),
        ),
        Flag("num_threads", "CPU threads per rank. (default: an equal share of the cores)", int),
        Flag(
            "placement_strategy",
            "Ray placement strategy of the ranks; STRICT_PACK places all of them on one node.",
            get_args(PlacementStrategy),
        ),
        Flag(
            "spare_ranks",
            "Number of spare processes per node, with which a rank that dies is replaced "
            "in less time. (default: 1 on GPUs, 0 on CPUs)",
            int,
        ),
        Flag(
            "all_reduce",
            "How results are summed over the GPUs of a node: auto uses a single kernel "
            "that also adds the residual and normalizes, and falls back to NCCL; nccl "
            "always uses NCCL.",
            get_args(AllReduce),
        ),
        Flag(
            "allow_unauthenticated_ray",
            "Start Ray although RAY_AUTH_MODE=disabled is set, so that every user of this machine "
            "can run code through Ray.",
            bool,
        ),
    ),
    "KV cache": (
        Flag("block_size", "Tokens per block, 1 to 256.", int),
        Flag(
            "num_blocks",
            "Number of blocks on the device. (default: as many as fit in memory)",
            int,
        ),
        Flag(
            "num_cpu_blocks",
            "Number of CPU blocks, for swapping and for prefixes evicted from the device. "
            "(default: up to 1 GiB; with GPUs, a quarter of the available memory for all "
            "ranks together)",
            int,
        ),
        Flag(
            "memory_fraction",
            "Fraction of device memory for weights, activations and KV cache.",
            float,
            "FRACTION",
        ),
        Flag("enable_prefix_cache", "Disable prefix caching.", bool),
        Flag(
            "enable_cpu_prefix_cache",
            "Do not keep prefixes that are evicted from the device in CPU blocks.",
            bool,
        ),
        Flag(
            "enable_kept_cpu_pool",
            "Allocate the CPU blocks in the rank itself; the prefixes in them are lost "
            "when the rank is replaced.",
            bool,
        ),
        Flag(
            "cpu_pool_checksums",
            "Compute checksums of the CPU blocks; when a rank is replaced, blocks whose "
            "checksum does not match are dropped.",
            bool,
        ),
        Flag(
            "disk_cache_folder",
            "Folder for files of prefixes evicted from the CPU blocks, which should be on "
            "a fast local disk. (default: no disk cache)",
            str,
            "FOLDER",
        ),
        Flag(
            "disk_cache_bytes",
            "Maximum size of the files in --disk-cache-folder, in bytes for all ranks together.",
            int,
        ),
        Flag(
            "kv_cache_dtype",
            "Data type of keys and values; auto uses that of the model.",
            get_args(KVCacheDtype),
        ),
    ),
    "scheduling": (
        Flag(
            "max_num_seqs",
            "Maximum number of sequences per step. (default: 256, or 1024 on GPUs of 70 GiB or "
            "more)",
            int,
        ),
        Flag(
            "max_num_batched_tokens",
            "Maximum number of tokens per step. (default: 2048, or 8192 on GPUs of 70 GiB or more)",
            int,
        ),
        Flag(
            "max_queued_requests", "Maximum number of waiting requests; others are rejected.", int
        ),
        Flag(
            "max_queued_tokens",
            "Maximum number of waiting prompt tokens; more are rejected.",
            int,
        ),
        Flag(
            "preemption",
            "Whether preempted sequences are swapped to CPU blocks or recomputed; auto "
            "selects the cheaper one.",
            get_args(Preemption),
        ),
        Flag(
            "itl_target_ms",
            "Target for the time between tokens while prompts are processed; the chunks of "
            "prompts are sized by the measured duration of steps. (default: no limit)",
            float,
            "MS",
        ),
        Flag(
            "structure_compile_s",
            "CPU time limit for compiling a JSON schema, regular expression or grammar.",
            float,
            "SECONDS",
        ),
    ),
}
_CHOSEN_EXECUTOR = "(default: local for a single rank, otherwise ray)"


def add_engine_flags(parser: argparse.ArgumentParser, *, executor: str | None) -> None:
    """Add the engine's flags to a command; without `executor`, the number of ranks decides it."""
    default = EngineOptions()
    for title, flags in _GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            is_chosen = flag.field == "executor" and executor is None
            added = replace(flag, help=f"{flag.help} {_CHOSEN_EXECUTOR}") if is_chosen else flag
            # Some commands have a --seed of their own, which seeds all that they do.
            if f"--{flag.field}" not in parser._option_string_actions:
                add_flag(group, added, getattr(default, flag.field))
    for name, kind in (("rope_scaling", read_object), ("rope_theta", float)):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest="hf_overrides",
            type=_override_of(name, kind),
            action=MergedObject,
            help=argparse.SUPPRESS,
        )
    parser.set_defaults(executor=executor)


def _override_of(name: str, kind: Callable[[str], object]) -> Callable[[str], Mapping[str, object]]:
    """Return a converter of the values of a flag for one field of config.json."""
    return lambda text: {name: kind(text)}


def engine_options(parsed: argparse.Namespace) -> EngineOptions:
    """Return the options that the flags give; several ranks need Ray."""
    given = {field.name: getattr(parsed, field.name) for field in fields(EngineOptions)}
    if given["executor"] is None:
        given["executor"] = "local" if given["tensor_parallel_size"] == 1 else "ray"
    return EngineOptions(**given)
