"""GGUF files that cannot be served are refused with one line, and take no memory."""

import resource
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.cli.commands import main
from tests.system.server_process import run_pagedray
from tests.workers.hub.damaged_gguf import MODELS, fuzz

LLAMA, GEMMA, QWEN = MODELS["llama"], MODELS["gemma3"], MODELS["qwen3moe"]
TOKENS = b"tokenizer.ggml.tokens"


def with_number(content: bytes, name: bytes, value: bytes) -> bytes:
    """Return a file with another value of a field of four bytes."""
    place = content.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4
    return content[:place] + value + content[place + 4 :]


def with_words(content: bytes, words: bytes, other: bytes) -> bytes:
    """Return a file with other bytes of the same length."""
    assert len(words) == len(other)
    assert words in content
    return content.replace(words, other)


def integer(value: int) -> bytes:
    return struct.pack("<I", value)


def with_count(content: bytes, name: bytes, count: int) -> bytes:
    """Return a file with another number of elements of an array."""
    place = content.index(name) + len(name) + 8
    return content[:place] + struct.pack("<Q", count) + content[place + 8 :]


def with_offset(content: bytes, name: bytes, offset: int) -> bytes:
    """Return a file with another offset of a vector."""
    place = content.index(name) + len(name) + 4 + 8 + 4
    return content[:place] + struct.pack("<Q", offset) + content[place + 8 :]


BAD: dict[str, Callable[[], bytes]] = {
    "is empty": lambda: b"",
    "has no GGUF header": lambda: b"GGML" + LLAMA[4:],
    "has GGUF version 1": lambda: LLAMA[:4] + integer(1) + LLAMA[8:],
    "architecture 'lhama' is not supported": lambda: with_words(LLAMA, b"llama", b"lhama"),
    "of an unknown type 99": lambda: with_words(
        LLAMA,
        b"output_norm.weight" + struct.pack("<IQI", 1, 32, 0),
        b"output_norm.weight" + struct.pack("<IQI", 1, 32, 99),
    ),
    "has type Q2_K; supported types": lambda: with_words(
        LLAMA,
        b"blk.0.attn_norm.weight" + integer(1) + struct.pack("<QI", 32, 0),
        b"blk.0.attn_norm.weight" + integer(1) + struct.pack("<QI", 256, 10),
    ),
    "is truncated: its header": lambda: LLAMA[:700],
    "is truncated: tensor": lambda: LLAMA[:-64],
    "tensors, which are more": lambda: LLAMA[:8] + struct.pack("<Q", 2**60) + LLAMA[16:],
    "metadata fields, which are more": lambda: LLAMA[:16] + struct.pack("<Q", 2**60) + LLAMA[24:],
    "strings in 'tokenizer.ggml.tokens'": lambda: with_count(LLAMA, TOKENS, 2**60),
    "within another tensor": lambda: with_offset(LLAMA, b"blk.0.attn_norm.weight", 0),
    "ends at byte": lambda: with_offset(LLAMA, b"blk.0.attn_norm.weight", 2**60),
    "'blk.0.attn_nirm.weight' is unknown in the architecture llama": lambda: with_words(
        LLAMA, b"attn_norm", b"attn_nirm"
    ),
    "layers": lambda: with_number(LLAMA, b"llama.block_count", integer(2**31)),
    "blk.1.attn_output.weight is missing": lambda: with_number(
        LLAMA, b"llama.block_count", integer(2)
    ),
    "context of 2147483648 tokens": lambda: with_number(
        LLAMA, b"llama.context_length", integer(2**31)
    ),
    "blk.0.ffn_down.weight has shape [32, 64]": lambda: with_number(
        LLAMA, b"llama.feed_forward_length", integer(2**20)
    ),
    "blk.0.attn_output.weight has shape [32, 32]": lambda: with_number(
        LLAMA, b"llama.attention.head_count", integer(2**14)
    ),
    "token_embd.weight has shape [12, 32]": lambda: with_number(
        LLAMA, b"llama.embedding_length", integer(2**20)
    ),
    "blk.0.ffn_down_exps.weight has shape [4, 32, 64]": lambda: with_number(
        QWEN, b"qwen3moe.expert_count", integer(2**12)
    ),
    "must be an integer, not 2.5": lambda: with_number(
        with_words(LLAMA, b"llama.block_count" + integer(4), b"llama.block_count" + integer(6)),
        b"llama.block_count",
        struct.pack("<f", 2.5),
    ),
    "model 'lhama' is not supported": lambda: with_words(
        GEMMA, struct.pack("<Q", 5) + b"llama", struct.pack("<Q", 5) + b"lhama"
    ),
    "pre 'smullm' is not supported": lambda: with_words(LLAMA, b"smollm", b"smullm"),
    "a token twice": lambda: with_words(
        LLAMA, struct.pack("<Q", 1) + b"a", struct.pack("<Q", 1) + b"b"
    ),
    "token that is not UTF-8": lambda: with_words(
        LLAMA, struct.pack("<Q", 1) + b"a", struct.pack("<Q", 1) + b"\xff"
    ),
    "the tokenizer cannot be rebuilt": lambda: with_words(LLAMA, b"ab c", b"ab x"),
    "must have two tokens with a space": lambda: with_words(LLAMA, b"ab c", b"ab_c"),
    "tokens is missing": lambda: with_words(LLAMA, TOKENS, b"tokenizer.ggml.tokenz"),
    "has 12 tokens": lambda: with_words(
        LLAMA,
        b"token_embd.weight" + struct.pack("<IQQ", 2, 32, 12),
        b"token_embd.weight" + struct.pack("<IQQ", 2, 32, 8),
    ),
    "chat_template is not UTF-8": lambda: with_words(LLAMA, b"{{ m.content", b"{{ m.\xffontent"),
}


@pytest.mark.parametrize("problem", BAD)
def test_serve_refuses_a_bad_file_with_one_line(
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    path.write_bytes(BAD[problem]())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert main(["serve", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pagedray: error: ")
    assert err.count("\n") == 1
    assert problem in err
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_the_command_exits_with_2(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(LLAMA[:-64])
    done = run_pagedray("serve", str(path))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"pagedray: error: {path} is truncated: tensor ")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("num_files", [400, pytest.param(20_000, marks=pytest.mark.slow)])
def test_damaged_files_load_or_are_refused(num_files: int, tmp_path: Path) -> None:
    fuzz(100, -1, tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = fuzz(num_files, num_files, tmp_path)
    assert outcomes["accepted"] > num_files / 20
    assert outcomes["loaded"] > 0
    assert outcomes.total() == num_files
    assert len(outcomes) > 15
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
