"""Decodes with llama.cpp, for `bench.cpu_int4`, in an environment of its own.

    pip install --no-binary llama-cpp-python llama-cpp-python gguf
    python bench/cpu_int4/llama_cpp_server.py --checkpoint /tmp/bf16 --gguf /tmp/q4.gguf --threads 2

It writes the checkpoint, a Llama in bfloat16, as GGUF, which llama.cpp's own quantizer converts to
Q4_0, unless the file is there. The order of rows of queries and keys stays as it is, which does not
change the speed. Each line of input is a list of prompts, which are decoded in one batch, and a
number of new tokens; the answer is the seconds that a greedy generation took. The first line of
output says what runs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from llama_cpp import __version__, llama_cpp

if TYPE_CHECKING:
    from collections.abc import Iterator

_CONTEXT = 512
_MAX_SEQUENCES = 8
_OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def main() -> int:
    """Answer until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    llama_cpp.llama_backend_init()
    if not options.gguf.exists():
        _write_q4_0(options.checkpoint, options.gguf, options.threads)
    decoder = _Decoder(options.gguf, options.threads)
    tensors = gguf.GGUFReader(options.gguf).tensors
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_bytes)
    (embedding,) = (one for one in tensors if one.name == "token_embd.weight")
    about = {
        "llama_cpp_python": __version__,
        "system": llama_cpp.llama_print_system_info().decode(),
        "bytes": dict(sizes),
        "head": embedding.tensor_type.name,
        "shape": [int(size) for size in embedding.shape],
    }
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        prompts, num_tokens = json.loads(line)
        started_s = time.perf_counter()
        decoder.generate(prompts, num_tokens)
        print(time.perf_counter() - started_s, flush=True)
    return 0


class _Decoder:
    """A model and a context, with llama.cpp's defaults but for the number of threads."""

    def __init__(self, path: Path, threads: int) -> None:
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = _CONTEXT * _MAX_SEQUENCES
        params.n_seq_max = _MAX_SEQUENCES
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)

    def generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        """Generate greedily from an empty cache."""
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_clear(memory, True)
        tokens, position = prompts, 0
        for _ in range(num_tokens):
            last = self._decode(tokens, position)
            position += len(tokens[0])
            tokens = [[self._best(index)] for index in last]

    def _decode(self, tokens: list[list[int]], position: int) -> list[int]:
        """Compute the next tokens of all sequences; return the indices of their last tokens."""
        batch, index, last = self._batch, 0, []
        for sequence, its_tokens in enumerate(tokens):
            for offset, token in enumerate(its_tokens):
                batch.token[index] = token
                batch.pos[index] = position + offset
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = sequence
                batch.logits[index] = offset == len(its_tokens) - 1
                index += 1
            last.append(index - 1)
        batch.n_tokens = index
        if llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        return last

    def _best(self, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


def _write_q4_0(checkpoint: Path, path: Path, threads: int) -> None:
    plain = path.with_suffix(".bf16.gguf")
    _write_plain(checkpoint, plain)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    params.nthread = threads
    if llama_cpp.llama_model_quantize(
        str(plain).encode(), str(path).encode(), ctypes.byref(params)
    ):
        raise RuntimeError("llama_model_quantize failed")
    plain.unlink()


def _write_plain(checkpoint: Path, path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, values in _tensors(checkpoint):
        if values.ndim == 1:
            # A bfloat16 is the upper half of a float32.
            writer.add_tensor(name, (values.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(name, values.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(checkpoint: Path) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield llama.cpp's names and the values of all tensors, bfloat16 as uint16."""
    for path in sorted(checkpoint.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(size))
        data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + size)
        for name, entry in entries.items():
            if name != "__metadata__":
                first, end = entry["data_offsets"]
                values = data[first:end].view(np.uint16).reshape(entry["shape"])
                yield _gguf_name(name.removesuffix(".weight")), values


def _gguf_name(name: str) -> str:
    if name in _OUTER_NAMES:
        return f"{_OUTER_NAMES[name]}.weight"
    index, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{index}.{_LAYER_NAMES[rest]}.weight"


if __name__ == "__main__":
    sys.exit(main())
