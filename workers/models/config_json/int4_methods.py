"""The formats GPTQ and AWQ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pagedray.weight_format import Int4Format

if TYPE_CHECKING:
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["GROUP_SIZES", "awq_format", "gptq_format", "group_size"]

GROUP_SIZES = (32, 64, 128, 256)
# How the weights were rounded, and which kernels compute with them.
_GPTQ_RECORDS = (
    *("damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "meta", "mse"),
    *("model_name_or_path", "model_file_base_name", "tokenizer", "dataset", "batch_size"),
    *("cache_block_outputs", "exllama_config", "max_input_length", "model_seqlen", "use_exllama"),
    *("use_cuda_fp16", "disable_exllama", "backend", "block_name_to_quantize", "act_group_aware"),
    *("module_name_preceding_first_block", "pad_token_id", "desc_act_order", "offload_to_disk"),
)
_AWQ_RECORDS = ("do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "backend")


def gptq_format(section: ConfigFile) -> Int4Format:
    """Return the format of a section. Raises CheckpointError."""
    section.note_read(*_GPTQ_RECORDS, "sym")
    bits = section.integer("bits", least=4, most=8)
    if bits not in (4, 8):
        raise section.rejection("bits", f"must be 4 or 8, not {bits}")
    num_bits: Literal[4, 8] = 4 if bits == 4 else 8
    section.choice("method", ("gptq",), "gptq")
    section.choice("pack_dtype", ("int32",), "int32")
    # The first format stores zeros less 1.
    key = section.first_of("checkpoint_format", "format")
    version = section.choice(key, ("gptq", "gptq_v2"), "gptq")
    return Int4Format(
        packing="gptq",
        num_bits=num_bits,
        group_size=group_size(section, "group_size"),
        zero_offset=1 if version == "gptq" else 0,
        is_ordered=section.flag("desc_act", False),
    )


def awq_format(section: ConfigFile) -> Int4Format:
    """Return the format of a section. Raises CheckpointError."""
    section.note_read(*_AWQ_RECORDS)
    section.integer(section.first_of("w_bit", "bits"), least=4, most=4)
    section.choice("method", ("awq",), "awq")
    section.choice("pack_dtype", ("int32",), "int32")
    # GPTQModel names the same packing by another key.
    for key in ("version", "checkpoint_format", "format"):
        section.choice(key, ("gemm", "GEMM"), "gemm")
    section.reject_unless("zero_point", True)
    size = group_size(section, section.first_of("q_group_size", "group_size"))
    return Int4Format(packing="awq", group_size=size)


def group_size(section: ConfigFile, key: str) -> int | None:
    """Return the inputs of a group, or None for all, which is stored as -1."""
    size = section.integer(key, least=-1, most=GROUP_SIZES[-1])
    if size == -1:
        return None
    if size not in GROUP_SIZES:
        allowed = ", ".join(map(str, GROUP_SIZES))
        raise section.rejection(key, f"must be one of -1, {allowed}, not {size}")
    return size
