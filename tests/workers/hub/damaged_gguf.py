"""Small GGUF files, and a fuzzer that damages them: each must load or be refused with one line.

python -m tests.workers.hub.damaged_gguf --files 1000000
"""

from __future__ import annotations

import argparse
import random
import re
import resource
import struct
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pagedray.errors import PagedRayError
from tests.workers.reference import loaded_model
from workers.hub.gguf_folder import files_of
from workers.models.families.registry import read_model_config
from workers.parallel.group import SoloGroup
from workers.weights.gguf_tensors import GgufModel
from workers.weights.tensor_entries import GGUF_LINK

__all__ = [
    "ARRAY",
    "F32",
    "LARGE",
    "MODELS",
    "Q4_0",
    "STRING",
    "UINT32",
    "field",
    "file_bytes",
    "fuzz",
    "tensor",
    "text",
]

STRING, ARRAY, UINT32, INT32, FLOAT32, BOOL = 8, 9, 4, 5, 6, 7
F32, Q4_0, Q4_1, Q8_0 = 0, 2, 3, 8
BYTES = {F32: (1, 4), Q4_0: (32, 18), Q4_1: (32, 20), Q8_0: (32, 34)}
"""Elements and bytes of a block."""
LARGE = 2**60
EXTREMES = (
    0,
    1,
    2,
    2**7,
    2**15,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    LARGE,
    2**63,
    2**64 - 1,
)
FLOATS = (0.0, -1.0, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"))
HIDDEN, INNER, EXPERTS, WORDS = 32, 64, 4, 12
_LOADED_EVERY = 40
"""One of so many accepted files is loaded."""


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def field(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: bytes, sizes: tuple[int, ...], kind: int, offset: int) -> bytes:
    shape = b"".join(struct.pack("<Q", size) for size in sizes)
    return text(name) + struct.pack("<I", len(sizes)) + shape + struct.pack("<IQ", kind, offset)


def file_bytes(
    *,
    version: int = 3,
    fields: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    num_fields: int | None = None,
    num_tensors: int | None = None,
    data: bytes = b"",
) -> bytes:
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(fields) if num_fields is None else num_fields,
    )
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join((*fields, *tensors))
    return header + bytes(-len(header) % 32) + data


def _number(name: str, value: float | bool) -> bytes:
    kinds = {bool: (BOOL, "<?"), int: (UINT32, "<I"), float: (FLOAT32, "<f")}
    kind, format = kinds[type(value)]
    return field(name.encode(), kind, struct.pack(format, value))


def _string(name: str, value: str) -> bytes:
    return field(name.encode(), STRING, text(value.encode()))


def _strings(name: str, values: list[str]) -> bytes:
    content = b"".join(text(value.encode()) for value in values)
    return field(name.encode(), ARRAY, struct.pack("<IQ", STRING, len(values)) + content)


def _numbers(name: str, kind: int, values: list[float]) -> bytes:
    format = "f" if kind == FLOAT32 else "i"
    content = struct.pack(f"<{len(values)}{format}", *values)
    return field(name.encode(), ARRAY, struct.pack("<IQ", kind, len(values)) + content)


def _model(architecture: str, more: tuple[bytes, ...], shapes: dict[str, tuple[int, ...]]) -> bytes:
    """Return a model of one layer; tensors with the inner dimension first."""
    sizes = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "attention.key_length": 16,
        "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    fields = (
        _string("general.architecture", architecture),
        *(_number(f"{architecture}.{name}", value) for name, value in sizes.items()),
        *more,
        _number("tokenizer.ggml.bos_token_id", 0),
        _number("tokenizer.ggml.eos_token_id", 1),
        _string("tokenizer.chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}"),
        _number("general.sampling.temp", 0.5),
    )
    layer = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HIDDEN, 32),
        "attn_k": (HIDDEN, 16),
        "attn_v": (HIDDEN, 16),
        "attn_output": (32, HIDDEN),
        "ffn_norm": (HIDDEN,),
    }
    outer = {"token_embd.weight": (HIDDEN, WORDS), "output_norm.weight": (HIDDEN,)}
    tensors, data = [], b""
    named = {f"blk.0.{name}.weight": shape for name, shape in (layer | shapes).items()}
    for index, (name, shape) in enumerate((outer | named).items()):
        kind = F32 if len(shape) == 1 else (Q8_0, Q4_0, Q4_1)[index % 3]
        block_size, block_bytes = BYTES[kind]
        tensors.append(tensor(name.encode(), shape, kind, len(data)))
        num_bytes = int(np.prod(shape)) // block_size * block_bytes
        data += bytes([0, 60]) * (num_bytes // 2) + bytes(-num_bytes % 32)
    return file_bytes(fields=fields, tensors=tuple(tensors), data=data)


_MLP: dict[str, tuple[int, ...]] = {
    "ffn_gate": (HIDDEN, INNER),
    "ffn_up": (HIDDEN, INNER),
    "ffn_down": (INNER, HIDDEN),
}
_BYTE_LEVEL = (
    _string("tokenizer.ggml.model", "gpt2"),
    _string("tokenizer.ggml.pre", "smollm"),
    _strings("tokenizer.ggml.tokens", ["<s>", "</s>", *"abcdef", "ab", "abc", "de", "f\u0120"]),
    _strings("tokenizer.ggml.merges", ["a b", "ab c", "d e"]),
    _numbers("tokenizer.ggml.token_type", INT32, [3, 3, *[1] * 10]),
)
_WORDS = ["<s>", "</s>", "<unk>", *"\u2581abcd", "ab", "\u2581a", "bc", "cd"]
_PIECES = (
    _string("tokenizer.ggml.model", "llama"),
    _strings(
        "tokenizer.ggml.tokens",
        ["<s>", "</s>", "<unk>", *"\u2581abcd", "ab", "\u2581a", "bc", "cd"],
    ),
    _numbers("tokenizer.ggml.scores", FLOAT32, [0, 0, 0, -9, -8, -7, -6, -5, -1, -2, -3, -4]),
    _numbers("tokenizer.ggml.token_type", INT32, [3, 3, 2, *[1] * 9]),
    _number("tokenizer.ggml.unknown_token_id", 2),
    _number("tokenizer.ggml.add_bos_token", True),
)
MODELS: dict[str, bytes] = {
    "llama": _model("llama", _BYTE_LEVEL, _MLP),
    "gemma3": _model(
        "gemma3",
        (*_PIECES, _number("gemma3.attention.sliding_window", 8)),
        {
            **_MLP,
            **dict.fromkeys(("post_attention_norm", "post_ffw_norm"), (HIDDEN,)),
            **dict.fromkeys(("attn_q_norm", "attn_k_norm"), (16,)),
        },
    ),
    "qwen3moe": _model(
        "qwen3moe",
        (
            *_BYTE_LEVEL,
            _number("qwen3moe.expert_count", EXPERTS),
            _number("qwen3moe.expert_used_count", 2),
            _number("qwen3moe.expert_feed_forward_length", INNER),
        ),
        {
            **dict.fromkeys(("attn_q_norm", "attn_k_norm"), (16,)),
            "ffn_gate_inp": (HIDDEN, EXPERTS),
            **{f"{name}_exps": (*shape, EXPERTS) for name, shape in _MLP.items()},
        },
    ),
}
"""Complete files, by architecture."""


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Return a file with one to four changes, most of them in its header."""
    changed = bytearray(content)
    end = content.index(b"blk.0.attn_norm") if chance.random() < 0.5 else _header_end(content)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        _CHANGES[chance.choices(range(len(_CHANGES)), _WEIGHTS)[0]](changed, chance, end)
    return bytes(changed)


def _header_end(content: bytes) -> int:
    return content.rindex(b".weight") + 64


def _place(changed: bytearray, chance: random.Random, end: int) -> int:
    limit = end if chance.random() < 0.95 else len(changed)
    return chance.randrange(max(1, min(limit, len(changed))))


def _set_byte(changed: bytearray, chance: random.Random, end: int) -> None:
    if changed:
        changed[_place(changed, chance, end)] = chance.randrange(256)


def _set_number(changed: bytearray, chance: random.Random, end: int) -> None:
    place = _place(changed, chance, end)
    if chance.random() < 0.3:
        value = struct.pack("<f", chance.choice(FLOATS))
    else:
        number = chance.choice(EXTREMES) + chance.choice((-1, 0, 0, 0, 1))
        size = chance.choice((1, 4, 4, 8, 8))
        value = (number % 2 ** (8 * size)).to_bytes(size, "little")
    changed[place : place + len(value)] = value


def _set_field(changed: bytearray, chance: random.Random, end: int) -> None:
    """Change the value of a field of numbers, which follows its type."""
    places = [
        match.end() for match in re.finditer(rb"(?:[a-z0-9_]{3,}\.)+[a-z_0-9]+", changed[:end])
    ]
    if places:
        place = chance.choice(places) + 4
        choices = (*(struct.pack("<I", number % 2**32) for number in EXTREMES), b"", b"\1\0\0\0")
        value = chance.choice((*choices, *(struct.pack("<f", number) for number in FLOATS)))
        changed[place : place + 4] = value


def _cut(changed: bytearray, chance: random.Random, end: int) -> None:
    del changed[_place(changed, chance, end) :]


def _remove(changed: bytearray, chance: random.Random, end: int) -> None:
    place = _place(changed, chance, end)
    del changed[place : place + chance.randrange(1, 33)]


def _repeat(changed: bytearray, chance: random.Random, end: int) -> None:
    place = _place(changed, chance, end)
    changed[place:place] = changed[place : place + chance.randrange(1, 65)]


def _exchange(changed: bytearray, chance: random.Random, end: int) -> None:
    """Copy bytes of the header to another place in it."""
    source, target = _place(changed, chance, end), _place(changed, chance, end)
    size = chance.randrange(1, 17)
    part = changed[source : source + size]
    changed[target : target + len(part)] = part


_CHANGES = (_set_byte, _set_number, _set_field, _cut, _remove, _repeat, _exchange)
_WEIGHTS = (5, 5, 6, 1, 1, 1, 3)


def fuzz(num_files: int, seed: int, folder: Path) -> Counter[str]:
    """Return how many damaged files ended in which way.

    Any other error than one of ours is raised, with the file left in the folder.
    """
    outcomes: Counter[str] = Counter()
    bases = list(MODELS.values())
    for index in range(num_files):
        chance = random.Random(f"{seed}/{index}")
        path = folder / "model.gguf"
        path.write_bytes(damaged(chance.choice(bases), chance))
        try:
            outcomes[_read(path, is_loaded=chance.randrange(_LOADED_EVERY) == 0)] += 1
        except PagedRayError as error:
            message = str(error)
            assert "\n" not in message, message
            outcomes[_kind(message)] += 1
    return outcomes


def _read(path: Path, *, is_loaded: bool) -> str:
    """Read a file as the server does, up to its weights or with them, and return what was done."""
    model = GgufModel.read(path)
    folder = path.with_name("made")
    folder.mkdir(exist_ok=True)
    for name, content in files_of(model).items():
        (folder / name).write_text(content, encoding="utf-8")
    read_model_config(folder)
    model.entries()
    if not is_loaded:
        return "accepted"
    link = folder / GGUF_LINK
    if not link.is_symlink():
        link.symlink_to(path)
    loaded_model(folder, SoloGroup(), "bfloat16")
    return "loaded"


def _kind(message: str) -> str:
    """Return the words of a message, without the path, names and numbers."""
    return " ".join(re.findall(r"(?<!\S)[a-z]+(?=[ .,;:])", message))[:60]


def _rows(outcomes: Counter[str]) -> Iterator[str]:
    for kind, number in outcomes.most_common():
        yield f"{number:9d}  {kind}"


def main() -> int:
    """Run the fuzzer, and print the outcomes and the memory."""
    parser = argparse.ArgumentParser(prog="python -m tests.workers.hub.damaged_gguf")
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started_s = time.perf_counter()
    # A warning would be a second line on standard error.
    warnings.simplefilter("error")
    with tempfile.TemporaryDirectory() as folder:
        fuzz(200, -1, Path(folder))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        outcomes = fuzz(options.files, options.seed, Path(folder))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print("\n".join(_rows(outcomes)))
    seconds = time.perf_counter() - started_s
    print(f"{outcomes.total()} files in {seconds:.0f} s; memory grew by {grown:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
