"""The flags of the engine: a table with a flag for each field of `EngineOptions`."""

from __future__ import annotations

import argparse
import json
import logging
import re
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, get_args

from cluster.cli.flag import Flag, MergedObject, add_flag, group_of, read_object, read_value
from cluster.engine.engine_options import EngineOptions
from cluster.engine.vllm_options import (
    IGNORED,
    IGNORED_SWITCHES,
    LISTS,
    OVERRIDES,
    REJECTED,
    WITHOUT_EFFECT,
    ignored_reason,
    is_our_behavior,
    notice_level,
    token_count,
)
from pagedray.config import (
    AllReduce,
    Device,
    KVCacheDtype,
    LoadFormat,
    MatrixDtype,
    MessageSpecialTokens,
    PlacementStrategy,
    Preemption,
    QuantizationMethod,
)
from pagedray.errors import StartupError
from pagedray.model_config import Dtype, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "add_engine_flags",
    "add_vllm_flags",
    "engine_options",
    "flag_notes",
    "ignored_flags",
    "log_ignored_flags",
]

logger = logging.getLogger(__name__)

_SHORT: Mapping[str, str] = {
    "api_server_count": "-asc",
    "attention_config": "-ac",
    "compilation_config": "-cc",
    "data_parallel_address": "-dpa",
    "data_parallel_backend": "-dpb",
    "data_parallel_external_lb": "-dpe",
    "data_parallel_hybrid_lb": "-dph",
    "data_parallel_multi_port_external_lb": "-dpm",
    "data_parallel_rank": "-dpn",
    "data_parallel_rpc_port": "-dpp",
    "data_parallel_size": "-dp",
    "data_parallel_size_local": "-dpl",
    "data_parallel_start_rank": "-dpr",
    "decode_context_parallel_size": "-dcp",
    "kernel_config": "-kc",
    "nnodes": "-n",
    "node_rank": "-r",
    "optimization_level": "-O",
    "pipeline_parallel_size": "-pp",
    "prefill_context_parallel_size": "-pcp",
}
_KINDS: Mapping[str, Callable[[str], object]] = {
    "rope_scaling": read_object,
    "rope_theta": float,
    "spec_tokens": int,
}
_OPTION = re.compile(r"(?<!-)\b(?:task|quantization|[a-z]+(?:_[a-z]+)+)\b")
_DEST = "ignored_flags"


def _tokens(name: str) -> Callable[[str], int | None]:
    """Return a converter of numbers of tokens, such as 32K."""

    def convert(text: str) -> int | None:
        try:
            return token_count(text, name)
        except StartupError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


_GROUPS = {
    "model": (
        Flag("revision", "Branch, tag or commit of a model on the Hub.", metavar="REVISION"),
        Flag(
            "download_dir", "The Hub's cache on each node. (default: HF_HOME's)", metavar="FOLDER"
        ),
        Flag("tokenizer", argparse.SUPPRESS),
        Flag("tokenizer_revision", argparse.SUPPRESS),
        Flag(
            "max_model_len",
            "Context length, such as 32768 or 32K. (default: the model's)",
            _tokens("max_model_len"),
        ),
        Flag(
            "hf_overrides",
            'JSON object of fields that replace fields of config.json, such as \'{"rope_scaling": '
            '{"rope_type": "yarn", "factor": 4.0}}\'.',
            read_object,
            "JSON",
        ),
        Flag("dtype", "Data type of the model. (default: the checkpoint's)", get_args(Dtype)),
        Flag(
            "quantization",
            "fp8 quantizes plain weights; others name the format of a checkpoint. (default: "
            "the checkpoint's)",
            get_args(QuantizationMethod),
            aliases=("-q",),
        ),
        Flag(
            "load_format",
            "auto reads the checkpoint; dummy initializes random weights.",
            get_args(LoadFormat),
        ),
        Flag("load_seed", "Random seed of dummy weights.", int),
        Flag(
            "task",
            "Generate texts, embed texts, score pairs of texts, or embed or score (pooling). "
            "(default: the checkpoint's own task)",
            (*get_args(Task), "pooling"),
        ),
        Flag(
            "chat_template",
            "File of a Jinja chat template, or its text, in place of the model's.",
            str,
            "TEMPLATE",
        ),
        Flag(
            "trust_request_chat_template",
            "Accept chat_template in requests: a program, which runs in a sandbox.",
            bool,
        ),
        Flag(
            "message_special_tokens",
            "Encode special tokens in messages as text, or as special tokens (parse), which lets "
            "clients forge roles.",
            get_args(MessageSpecialTokens),
        ),
    ),
    "sampling defaults": (
        Flag(
            "generation_config",
            "Where temperature, top_p, top_k, min_p and repetition_penalty come from if a request "
            "does not set them: auto (the model), none, or a folder.",
            str,
            "FOLDER",
        ),
        Flag(
            "override_generation_config",
            "JSON object of these defaults, such as '{\"temperature\": 0.6}'.",
            read_object,
            "JSON",
        ),
        Flag("seed", "Seeds requests without a seed. (default: random)", int),
    ),
    "memory and KV cache": (
        Flag(
            "memory_fraction",
            "Fraction of device memory for weights, activations and KV cache.",
            float,
            "FRACTION",
        ),
        Flag("kv_cache_dtype", "Data type of keys and values.", get_args(KVCacheDtype)),
        Flag(
            "mamba_ssm_cache_dtype",
            "Data type of the matrices of recurrent layers; auto is that of the checkpoint.",
            get_args(MatrixDtype),
        ),
        Flag("block_size", "Tokens per block, 1 to 256.", int),
        Flag("num_blocks", "Blocks on the device. (default: as many as fit)", int),
        Flag(
            "num_cpu_blocks",
            "CPU blocks, for swapping and for evicted prefixes. (default: up to 1 GiB; with "
            "GPUs, a quarter of the available memory)",
            int,
        ),
        Flag("enable_prefix_cache", "Disable prefix caching.", bool),
        Flag("enable_cpu_prefix_cache", "Do not keep evicted prefixes in CPU blocks.", bool),
        Flag(
            "disk_cache_folder",
            "Folder on a fast local disk for prefixes evicted from CPU blocks. (default: none)",
            str,
            "FOLDER",
        ),
        Flag("disk_cache_bytes", "Maximum size of this folder, for all ranks together.", int),
    ),
    "scheduling": (
        Flag(
            "max_num_seqs",
            "Maximum sequences per step. (default: 256, or 1024 on GPUs of 70 GiB or more)",
            int,
        ),
        Flag(
            "max_num_batched_tokens",
            "Maximum tokens per step. (default: 2048, or 8192 on GPUs of 70 GiB or more)",
            _tokens("max_num_batched_tokens"),
        ),
        Flag("max_queued_requests", "Maximum waiting requests; others are rejected.", int),
        Flag("max_queued_tokens", "Maximum waiting prompt tokens; more are rejected.", int),
        Flag(
            "itl_target_ms",
            "Target for the time between tokens while prompts are processed. (default: none)",
            float,
            "MS",
        ),
        Flag(
            "preemption",
            "Swap preempted sequences to CPU blocks or recompute them; auto selects the cheaper.",
            get_args(Preemption),
        ),
        Flag(
            "speculative_config",
            "JSON object of how next tokens are guessed, which changes only the speed, such as "
            '\'{"method": "ngram", "num_speculative_tokens": 4}\'. (default: they are not)',
            read_object,
            "JSON",
            aliases=("-sc",),
        ),
        Flag(
            "structure_compile_s",
            "CPU time limit for compiling a schema, regular expression or grammar.",
            float,
            "SECONDS",
        ),
    ),
    "ranks and kernels": (
        Flag(
            "tensor_parallel_size",
            "Ranks, one per device, that the model is sharded over.",
            int,
            aliases=("-tp",),
        ),
        Flag(
            "enable_expert_parallel",
            "Give each rank whole experts, not columns of every expert.",
            bool,
            aliases=("-ep",),
        ),
        Flag(
            "device",
            "Device of ranks. (default: cuda if there is an NVIDIA GPU, else cpu)",
            get_args(Device),
        ),
        Flag(
            "executor",
            "ray runs each rank as a Ray actor; local runs a single rank in this process.",
            ("ray", "local"),
        ),
        Flag("num_threads", "CPU threads per rank. (default: an equal share of the cores)", int),
        Flag(
            "placement_strategy",
            "Ray placement of the ranks; STRICT_PACK uses a single node.",
            get_args(PlacementStrategy),
        ),
        Flag(
            "spare_ranks",
            "Spare processes per node that replace dead ranks. (default: 1 on GPUs, 0 on CPUs)",
            int,
        ),
        Flag(
            "allow_unauthenticated_ray",
            "Start Ray with RAY_AUTH_MODE=disabled: every user of the machine can run code.",
            bool,
        ),
        Flag(
            "attention_backend",
            "Attention backend: auto, hybrid, torch_sdpa, flashinfer or xformers; auto selects "
            "the fastest.",
            str,
            "NAME",
        ),
        Flag(
            "all_reduce",
            "auto sums over GPUs with one kernel where possible; nccl always uses NCCL.",
            get_args(AllReduce),
        ),
        Flag("enforce_eager", "Disable CUDA graphs: less memory, slower decoding.", bool),
        Flag(
            "max_graph_tokens",
            "Maximum tokens of a step with prompts that runs as CUDA graphs; 0 is none.",
            int,
        ),
    ),
}

_CHOSEN_EXECUTOR = "(default: local for a single rank, otherwise ray)"


def add_engine_flags(parser: argparse.ArgumentParser, *, executor: str | None) -> None:
    """Add the engine's flags to a command; without `executor`, the number of ranks decides it."""
    default = EngineOptions()
    for title, flags in _GROUPS.items():
        group = group_of(parser, title)
        for flag in flags:
            is_chosen = flag.field == "executor" and executor is None
            added = replace(flag, help=f"{flag.help} {_CHOSEN_EXECUTOR}") if is_chosen else flag
            # Some commands have a --seed of their own, which seeds all that they do.
            if f"--{flag.field}" not in parser._option_string_actions:
                add_flag(group, added, getattr(default, flag.field))
    for name, (whole, part) in OVERRIDES.items():
        parser.add_argument(
            _flag(name),
            dest=whole,
            type=_override_of(part, _KINDS.get(name, str)),
            action=MergedObject,
            help=argparse.SUPPRESS,
        )
    parser.set_defaults(executor=executor)


def _override_of(name: str, kind: Callable[[str], object]) -> Callable[[str], Mapping[str, object]]:
    """Return a converter of the values of a flag for one field of an object."""

    def convert(text: str) -> dict[str, object]:
        return {name: kind(text)}

    # Errors of argparse name the type.
    convert.__name__ = kind.__name__
    return convert


def engine_options(parsed: argparse.Namespace) -> EngineOptions:
    """Return the options that the flags give; several ranks need Ray."""
    given = {field.name: getattr(parsed, field.name) for field in fields(EngineOptions)}
    if given["executor"] is None:
        given["executor"] = "local" if given["tensor_parallel_size"] == 1 else "ray"
    return EngineOptions(**given)


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that the parser lacks, hidden from the help."""
    for name in (*IGNORED, *REJECTED):
        if _is_switch(name):
            _add(parser, name, _flags(name), nargs=0, const=True)
            _add(parser, name, [_flag(f"no_{name}")], nargs=0, const=False)
        else:
            _add(parser, name, _flags(name), nargs="*" if name in LISTS else "?", const=True)


def log_ignored_flags(parsed: argparse.Namespace) -> None:
    """Log a line for each given flag that has no effect."""
    for name, line in ignored_flags(parsed).items():
        logger.log(notice_level(name), "%s", line)


def ignored_flags(parsed: argparse.Namespace) -> Mapping[str, str]:
    """Return the options of given flags that have no effect, with a line on each."""
    found: Mapping[str, str] = getattr(parsed, _DEST, {})
    return found


def flag_notes(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """Return flags of vLLM that are missing or have other names here, with a note on each.

    `parser` is the parser of `pagedray serve`.
    """
    notes: dict[str, str] = {}
    for action in parser._actions:
        if action.help != argparse.SUPPRESS and action.dest != "help":
            own, *others = action.option_strings or ("",)
            notes |= dict.fromkeys(others, f"the same as `{own}`")
    notes["--enable-prefix-caching"] = "the default"
    for name, reason in {**IGNORED, **REJECTED}.items():
        if _flag(name) not in notes and isinstance(_action(parser, name), _VllmFlag):
            kind = "no effect" if name in IGNORED else f"rejected{_exceptions(name)}"
            if name in REJECTED and _is_switch(name) and is_our_behavior(name, value=True):
                kind = "the default; its opposite is rejected"
            notes[_flag(name)] = f"{kind}: {reason}"
    return sorted((flag, _with_flags(note, parser, mark="`")) for flag, note in notes.items())


# Any: argparse's own arguments.
def _add(parser: argparse.ArgumentParser, name: str, flags: list[str], **more: Any) -> None:
    lacking = [flag for flag in flags if flag not in parser._option_string_actions]
    if lacking:
        # Hundreds of flags for each command: `add_argument` would format each of them.
        action = _VllmFlag(lacking, _DEST, name=name, help=argparse.SUPPRESS, **more)
        parser._add_action(action)


def _action(parser: argparse.ArgumentParser, name: str) -> argparse.Action | None:
    return parser._option_string_actions.get(_flag(name))


def _is_switch(name: str) -> bool:
    """Return whether an option is true or false, so that it has a `--no-` form."""
    known = WITHOUT_EFFECT.get(name, ())
    return name in IGNORED_SWITCHES or any(isinstance(value, bool) for value in known)


def _with_flags(text: str, parser: argparse.ArgumentParser, *, mark: str = "") -> str:
    """Return a text with the names of options as the command line writes them."""

    def write(found: re.Match[str]) -> str:
        action = _action(parser, found[0])
        is_ours = action is not None and action.help != argparse.SUPPRESS
        return f"{mark}{_flag(found[0])}{mark}" if is_ours else found[0]

    return _OPTION.sub(write, text)


def _exceptions(name: str) -> str:
    """Return the values that are not rejected, if a user could write some."""
    values = [value for value in WITHOUT_EFFECT.get(name, ()) if not isinstance(value, bool)]
    shown = [f"`{value if isinstance(value, str) else json.dumps(value)}`" for value in values]
    return f", except for {' and '.join(shown)}" if shown else ""


def _flags(name: str) -> list[str]:
    return [_flag(name), *([_SHORT[name]] if name in _SHORT else [])]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# Any: argparse's own arguments, in both.
class _VllmFlag(argparse.Action):
    """Notes a flag that has no effect, or ends the command with the reason to reject it."""

    def __init__(self, *arguments: Any, name: str, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "default": argparse.SUPPRESS})
        self._name = name

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None
    ) -> None:
        value = self._value(values)
        # A short name says little.
        option = self.option_strings[0] if option.count("-") == 1 else option
        if reason := ignored_reason(self._name, value):
            line = f"{option} has no effect: {_with_flags(reason, parser)}."
            setattr(namespace, _DEST, {**getattr(namespace, _DEST, {}), self._name: line})
        elif not is_our_behavior(self._name, value):
            parser.error(f"{option} is not supported: {_with_flags(REJECTED[self._name], parser)}")

    def _value(self, values: Any) -> object:
        if self.nargs == 0:
            return self.const
        if isinstance(values, list):
            return [read_value(one) for one in values]
        return read_value(values) if isinstance(values, str) else values
