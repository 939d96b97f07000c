"""The tensors of GGUF files under the names and in the layout of transformers' checkpoints.

Weights of most types keep their numbers, as weights of int4 and int8 with scales, and minimums if
the type has them; all other quantized tensors are dequantized while they are read.

llama.cpp changes three things when it converts a checkpoint, which are reverted here: the rows of
queries and keys of some architectures are in pairs for its rotary embedding, the weights of
Gemma's norms are one larger, and the experts of a layer are one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from pagedray.errors import CheckpointError
from pagedray.text import quote
from workers.weights.gguf_file import GgufFile, GgufTensor, Value, shard_paths
from workers.weights.tensor_entries import TensorEntry

if TYPE_CHECKING:
    import numpy.typing as npt

    _Bytes = npt.NDArray[np.uint8]

__all__ = ["GgufModel"]

_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
# The formats of `quantization_config`, with the inputs that share a scale.
_KEPT: Mapping[str, tuple[str, int]] = {
    "Q4_0": ("int4", 32),
    "Q4_1": ("int4_minimums", 32),
    "Q4_K": ("int4_minimums", 32),
    "Q5_0": ("int8", 32),
    "Q6_K": ("int8_16", 16),
    "Q8_0": ("int8", 32),
}
_PER_WORD = 8
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"

# Architectures with the rows of queries and keys in pairs.
_PAIRED = frozenset({"llama", "granite", "smollm3"})
# Architectures with norms that multiply by one plus the weight in transformers.
_OFFSET_NORMS = frozenset({"gemma", "gemma2", "gemma3"})
_OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NAMES_OF: Mapping[str, Mapping[str, str]] = {
    "gemma2": _SANDWICH,
    "gemma3": _SANDWICH,
    "olmo2": {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "mixtral": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    },
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
}
_FUSED = (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"))
# Factors of rotary embeddings, which become fields of config.json.
_IGNORED = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight")
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufEntry(TensorEntry):
    """A tensor that is converted from rows of a GGUF file."""

    type: GGMLQuantizationType
    stored_columns: int
    """Elements of a row in the file; 1 for a vector."""
    part: Literal["values", "numbers", "scales", "minimums"] = "values"
    """Values, or a part of a quantized weight."""
    head_size: int = 0
    """Rows of each head if they are in pairs, otherwise 0."""
    offset: float = 0.0
    """Added to each value."""

    @property
    def row_bytes(self) -> int:
        block_size, block_bytes = GGML_QUANT_SIZES[self.type]
        return self.stored_columns // block_size * block_bytes

    @property
    def row_step(self) -> int:
        return self.head_size or 1

    def converted(self, stored: _Bytes) -> torch.Tensor:
        """Return the values of whole rows, `[num_rows, row_bytes]` as stored."""
        rows = stored.reshape(-1, self.row_bytes)
        if self.head_size:
            # Pairs of adjacent rows become two halves of a head.
            pairs = rows.reshape(-1, self.head_size // 2, 2, self.row_bytes)
            rows = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
        if self.part == "values":
            values = torch.from_numpy(_dequantized(rows, self.type))
            if self.offset:
                values = values + self.offset
            return values.view(-1, *self.shape[1:])
        _, block_bytes = GGML_QUANT_SIZES[self.type]
        read = {"numbers": _numbers, "scales": _scales, "minimums": _minimums}[self.part]
        parts = read(rows.reshape(-1, block_bytes), self.type)
        return torch.from_numpy(parts.reshape(len(rows), -1))


def _scales(blocks: _Bytes, kind: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    """Return the scale of each group, `[num_blocks, groups]`."""
    if kind == GGMLQuantizationType.Q4_K:
        factors, _ = quants.Q4_K.get_scale_min(blocks[:, 4:16])
        return _halves(blocks, 0) * factors.astype(np.float32)
    if kind == GGMLQuantizationType.Q6_K:
        return _halves(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _halves(blocks, 0)


def _minimums(blocks: _Bytes, kind: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    """Return the value of number 0 of each group, `[num_blocks, groups]`."""
    if kind == GGMLQuantizationType.Q4_K:
        _, factors = quants.Q4_K.get_scale_min(blocks[:, 4:16])
        return -_halves(blocks, 2) * factors.astype(np.float32)
    return _halves(blocks, 2)


def _numbers(
    blocks: _Bytes, kind: GGMLQuantizationType
) -> npt.NDArray[np.int8] | npt.NDArray[np.int32]:
    """Return the numbers of each block, int8, or eight of four bits in an int32."""
    name = kind.name
    if name == "Q8_0":
        return np.ascontiguousarray(blocks[:, 2:]).view(np.int8)
    if name == "Q5_0":
        fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
        return (_in_order(blocks[:, 6:]) | fifth << 4).view(np.int8) - np.int8(16)
    if name == "Q6_K":
        lower = _in_order(blocks[:, :128].reshape(-1, 64)).reshape(-1, 256)
        shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
        upper = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
        return (lower | upper.reshape(-1, 256) << 4).view(np.int8) - np.int8(32)
    first, chunk = {"Q4_0": (2, 16), "Q4_1": (4, 16), "Q4_K": (16, 32)}[name]
    return _packed(_in_order(blocks[:, first:].reshape(-1, chunk)))


def _halves(blocks: _Bytes, first: int) -> npt.NDArray[np.float32]:
    stored = np.ascontiguousarray(blocks[:, first : first + 2]).view(np.float16)
    return stored.astype(np.float32)


def _in_order(numbers: _Bytes) -> _Bytes:
    """Return numbers of four bits: the lower half of each byte, and then the upper half."""
    return np.concatenate((numbers & 15, numbers >> 4), axis=-1)


def _dequantized(rows: _Bytes, kind: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    if kind == GGMLQuantizationType.F16:
        return rows.view(np.float16).astype(np.float32)
    if kind == GGMLQuantizationType.F32:
        return rows.view(np.float32).copy()
    # Scales of damaged files may be infinite; such weights are refused after loading.
    with np.errstate(all="ignore"):
        return quants.dequantize(rows, kind)


def _packed(numbers: _Bytes) -> npt.NDArray[np.int32]:
    """Return eight numbers in each word, the first in the lowest bits."""
    pairs = np.ascontiguousarray(numbers[:, ::2] | numbers[:, 1::2] << 4)
    return pairs.view("<i4")


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The metadata and the tensors of all files of a model."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def read(cls, path: Path) -> GgufModel:
        """Read the header of a file, or of all shards of a split model. Raises CheckpointError."""
        files = [GgufFile.read(shard) for shard in shard_paths(path)]
        tensors: dict[str, GgufTensor] = {}
        for file in files:
            for name, tensor in file.tensors.items():
                if name in tensors:
                    raise CheckpointError(f"{file.path}: tensor {name} is in two files.")
                if tensor.type.name not in _TYPES:
                    raise CheckpointError(
                        f"{file.path}: tensor {name} has type {tensor.type.name}; supported types "
                        f"are {', '.join(_TYPES)}."
                    )
                tensors[name] = tensor
        return cls(path, files[0].metadata, tensors)

    @property
    def architecture(self) -> str:
        """The architecture; Mixtral's is `mixtral`, which files do not distinguish from Llama."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise CheckpointError(f"{self.path} has no general.architecture.")
        return "mixtral" if name == "llama" and self.metadata.get("llama.expert_count") else name

    def kept_formats(self) -> dict[str, str]:
        """Return the format of each weight that stays quantized, by its layer in transformers.

        Weights that one product computes stay quantized only if all of them have the same format.
        Those of a model with experts are dequantized. A tied head has a format of its own.
        """
        formats: dict[str, str] = {}
        if any("_exps." in name for name in self.tensors):
            return formats
        for name, tensor in self.tensors.items():
            if tensor.type.name not in _KEPT or len(tensor.shape) != 2 or name == _EMBEDDING:
                continue
            match = _LAYER.fullmatch(name)
            names = [name]
            if match is not None:
                group = next((group for group in _FUSED if match[2] in group), (match[2],))
                names = [f"blk.{match[1]}.{part}.weight" for part in group]
            kept = {_KEPT.get(self.tensors[one].type.name) for one in names if one in self.tensors}
            if len(kept) == 1:
                formats[self._name(name).removesuffix(".weight")], _ = _KEPT[tensor.type.name]
        embedding = self.tensors.get(_EMBEDDING)
        if embedding is not None and _HEAD not in self.tensors and embedding.type.name in _KEPT:
            formats["lm_head"], _ = _KEPT[embedding.type.name]
        return formats

    def entries(self) -> dict[str, TensorEntry]:
        """Return the tensors by their names in transformers. Raises CheckpointError."""
        formats = self.kept_formats()
        entries: dict[str, TensorEntry] = {}
        for name, tensor in self.tensors.items():
            if _IGNORED.fullmatch(name):
                continue
            stem = self._name(name)
            layer = stem.removesuffix(".weight")
            if "{}" in stem:
                if len(tensor.shape) != 3 or tensor.shape[0] != self._number("expert_count"):
                    raise CheckpointError(
                        f"{tensor.path}: tensor {name} has another number of experts than "
                        "expert_count."
                    )
                for expert in range(tensor.shape[0]):
                    entries[stem.format(expert)] = self._entry(name, tensor, expert=expert)
            elif layer in formats:
                entries |= _kept_entries(layer, self._entry(name, tensor), formats[layer])
            else:
                entries[stem] = self._entry(name, tensor)
        if "lm_head" in formats and _HEAD not in self.tensors:
            head = self._entry(_EMBEDDING, self.tensors[_EMBEDDING])
            entries |= _kept_entries("lm_head", head, formats["lm_head"])
        return entries

    def _entry(self, name: str, tensor: GgufTensor, *, expert: int | None = None) -> GgufEntry:
        shape = tensor.shape if expert is None else tensor.shape[1:]
        is_vector = len(shape) == 1
        if is_vector and GGML_QUANT_SIZES[tensor.type][0] != 1:
            raise CheckpointError(
                f"{tensor.path}: tensor {name} has one dimension and is quantized."
            )
        head_size = 0
        if self.architecture in (*_PAIRED, "mixtral") and re.search(r"\.attn_[qk]\.", name):
            key = "head_count" if ".attn_q." in name else "head_count_kv"
            head_size = shape[0] // self._number(f"attention.{key}")
        is_offset = self.architecture in _OFFSET_NORMS and name.endswith("norm.weight")
        return GgufEntry(
            path=tensor.path,
            dtype="F32",
            shape=shape,
            first_byte=tensor.first_byte + (expert or 0) * shape[0] * tensor.row_bytes,
            type=tensor.type,
            stored_columns=1 if is_vector else shape[-1],
            head_size=head_size,
            offset=-1.0 if is_offset else 0.0,
        )

    def _number(self, key: str) -> int:
        value = self.metadata.get(f"{self.metadata['general.architecture']}.{key}")
        if not isinstance(value, int) or value <= 0:
            raise CheckpointError(
                f"{self.path}: {key} must be a positive number, not {value!r:.60}."
            )
        return value

    def _name(self, name: str) -> str:
        """Return the name in transformers, with `{}` for the number of an expert."""
        if match := _LAYER.fullmatch(name):
            names = {**_LAYER_NAMES, **_NAMES_OF.get(self.architecture, {})}
            if match[2] in names:
                return f"model.layers.{match[1]}.{names[match[2]]}.{match[3]}"
        stem, _, kind = name.rpartition(".")
        if stem in _OUTER_NAMES:
            return f"{_OUTER_NAMES[stem]}.{kind}"
        raise CheckpointError(
            f"{self.path}: tensor {quote(name)} is unknown in the architecture {self.architecture}."
        )


def _kept_entries(layer: str, entry: GgufEntry, format: str) -> Iterator[tuple[str, GgufEntry]]:
    """Yield the numbers and the scales of a quantized weight, and its minimums if any."""
    out_size, in_size = entry.shape
    _, group_size = _KEPT[entry.type.name]
    groups = (out_size, in_size // group_size)
    yield f"{layer}.weight_scale", replace(entry, part="scales", shape=groups)
    if format.startswith("int8"):
        yield f"{layer}.weight", replace(entry, part="numbers", dtype="I8")
        return
    shape = (out_size, in_size // _PER_WORD)
    yield f"{layer}.weight_packed", replace(entry, part="numbers", dtype="I32", shape=shape)
    if format == "int4_minimums":
        yield f"{layer}.weight_minimum", replace(entry, part="minimums", shape=groups)
