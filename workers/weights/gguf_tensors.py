"""The tensors of GGUF files under the names and in the layout of transformers' checkpoints.

Weights of Q4_0 and Q8_0 keep their numbers and scales, as weights of int4 and int8; all other
quantized tensors are dequantized while they are read.

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


__all__ = ["GgufEntry", "GgufModel"]

_GROUP_SIZE = 32
"""Inputs that share a scale in Q4_0 and Q8_0."""
_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
_KEPT_BITS = {GGMLQuantizationType.Q4_0: 4, GGMLQuantizationType.Q8_0: 8}
_PER_WORD = 8

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
    part: Literal["values", "numbers", "scales"] = "values"
    """Values, or the numbers or the scales of a quantized weight."""
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

    def converted(self, stored: npt.NDArray[np.uint8]) -> torch.Tensor:
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
        blocks = rows.reshape(len(rows), -1, block_bytes)
        if self.part == "scales":
            scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)
            return torch.from_numpy(scales.reshape(len(rows), -1))
        numbers = np.ascontiguousarray(blocks[:, :, 2:])
        if self.type == GGMLQuantizationType.Q8_0:
            return torch.from_numpy(numbers.view(np.int8).reshape(len(rows), -1))
        return torch.from_numpy(_packed(numbers).reshape(len(rows), -1))


def _dequantized(
    rows: npt.NDArray[np.uint8], kind: GGMLQuantizationType
) -> npt.NDArray[np.float32]:
    if kind == GGMLQuantizationType.F16:
        return rows.view(np.float16).astype(np.float32)
    if kind == GGMLQuantizationType.F32:
        return rows.view(np.float32).copy()
    # Scales of damaged files may be infinite; such weights are refused after loading.
    with np.errstate(all="ignore"):
        return quants.dequantize(rows, kind)


def _packed(numbers: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    """Return eight numbers in each word, the first in the lowest bits.

    In a block of Q4_0, a byte holds a number of the first half and one of the second half.
    """
    in_order = np.concatenate((numbers & 15, numbers >> 4), axis=-1)
    words = in_order.reshape(*in_order.shape[:-1], -1, _PER_WORD // 2, 2)
    pairs = np.ascontiguousarray(words[..., 0] | (words[..., 1] << 4))
    return pairs.view("<i4").reshape(*in_order.shape[:-1], -1)


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

    def kept_bits(self) -> dict[str, int]:
        """Return the bits of each weight that stays quantized, by its layer in transformers.

        Weights that one product computes stay quantized only if all of them have the same type.
        Those of a model with experts are dequantized.
        """
        bits: dict[str, int] = {}
        if any("_exps." in name for name in self.tensors):
            return bits
        for name, tensor in self.tensors.items():
            match = _LAYER.fullmatch(name)
            if match is None or tensor.type not in _KEPT_BITS or len(tensor.shape) != 2:
                continue
            group = next((group for group in _FUSED if match[2] in group), (match[2],))
            names = [f"blk.{match[1]}.{part}.weight" for part in group]
            if len({self.tensors[one].type for one in names if one in self.tensors}) == 1:
                bits[self._name(name).removesuffix(".weight")] = _KEPT_BITS[tensor.type]
        return bits

    def entries(self) -> dict[str, TensorEntry]:
        """Return the tensors by their names in transformers. Raises CheckpointError."""
        bits = self.kept_bits()
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
            elif layer in bits:
                entries |= _kept_entries(layer, self._entry(name, tensor), bits[layer])
            else:
                entries[stem] = self._entry(name, tensor)
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


def _kept_entries(layer: str, entry: GgufEntry, num_bits: int) -> Iterator[tuple[str, GgufEntry]]:
    """Yield the numbers and the scales of a quantized weight."""
    out_size, in_size = entry.shape
    scales = replace(entry, part="scales", dtype="F16", shape=(out_size, in_size // _GROUP_SIZE))
    yield f"{layer}.weight_scale", scales
    if num_bits == 8:
        yield f"{layer}.weight", replace(entry, part="numbers", dtype="I8")
        return
    shape = (out_size, in_size // _PER_WORD)
    yield f"{layer}.weight_packed", replace(entry, part="numbers", dtype="I32", shape=shape)
