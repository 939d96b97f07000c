"""Startup errors print one line that names the cause, and exit with code 2."""

import json
import math
import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.cli.commands import main
from tests.system.server_process import TINY_LLAMA, run_pagedray

SCALE = "model.layers.2.mlp.down_proj.weight_scale"
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 7873024\n"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 256}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = tmp_path / "model"
    shutil.copytree(TINY_LLAMA, target)
    return target


def edit_config(folder: Path, **changes: Any) -> None:  # Any: JSON values
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def drop_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path)


def reshape_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, path)


def add_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), "model.layers.0.lora.weight": torch.ones(2, 2)}, path)


def store_fp8(folder: Path, scale: float | None) -> None:
    """Store the layers in fp8, one of them with this scale, or without one."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = torch.ones(1)
    if scale is None:
        del tensors[SCALE]
    else:
        tensors[SCALE] = torch.tensor([scale])
    save_file(tensors, path)
    edit_config(folder, quantization_config={"quant_method": "fp8"})


def lie_about_offsets(folder: Path) -> None:
    """Let the header say that a tensor has twice its bytes."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    entry = header["model.norm.weight"]
    first, end = entry["data_offsets"]
    entry["data_offsets"] = [first, 2 * end - first]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def lie_about_length(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**62) + path.read_bytes()[8:])


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def spoil_value(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] = math.nan
    save_file(tensors, path)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


BROKEN: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), ("config.json",)),
    "no folder": (shutil.rmtree, ("model", "not a folder")),
    "truncated": (truncate, ("model.safetensors",)),
    "missing tensor": (drop_tensor, ("model.norm.weight",)),
    "NaN": (spoil_value, ("model.norm.weight", "1 value that is NaN or infinite")),
    "wrong shape": (reshape_tensor, ("model.norm.weight",)),
    "unknown architecture": (
        lambda folder: edit_config(folder, architectures=["GPT7LMHeadModel"]),
        ("GPT7LMHeadModel", "LlamaForCausalLM"),
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), ("tokenizer.json",)),
    "invalid tokenizer": (write("tokenizer.json", "{}"), ("tokenizer.json", "not a valid")),
    "extra tensor": (add_tensor, ("unexpected tensor model.layers.0.lora.weight",)),
    "pointer instead of weights": (write("model.safetensors", POINTER), ("git lfs pull",)),
    "pointer instead of tokenizer": (write("tokenizer.json", POINTER), ("git lfs pull",)),
    "lying offsets": (lie_about_offsets, ("model.safetensors", "model.norm.weight")),
    "lying length": (lie_about_length, ("model.safetensors", "truncated or corrupt", str(2**62))),
    "pickled weights": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        ("No model.safetensors",),
    ),
    "broken template": (write("chat_template.jinja", "{% for %}"), ("chat_template.jinja",)),
    "broken tokenizer settings": (
        write("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "not valid JSON"),
    ),
    "unknown format of weights": (
        lambda folder: edit_config(folder, quantization_config={"quant_method": "quip"}),
        ("quantization_config.quant_method must be one of awq, compressed", "quip"),
    ),
    "no scales": (
        lambda folder: edit_config(folder, quantization_config={"quant_method": "fp8"}),
        ("dtype", "supported dtypes are F8_E4M3"),
    ),
    "a missing scale": (lambda folder: store_fp8(folder, None), (f"tensor {SCALE} is missing",)),
    "a scale that is NaN": (
        lambda folder: store_fp8(folder, math.nan),
        (f"tensor {SCALE} has 1 value that is NaN or infinite",),
    ),
    "unknown number of bits": (
        lambda folder: edit_config(folder, quantization_config=GPTQ | {"bits": 3}),
        ("quantization_config.bits must be an integer from 4 to 8, not 3",),
    ),
    "unknown size of groups": (
        lambda folder: edit_config(folder, quantization_config=GPTQ | {"group_size": 100}),
        ("quantization_config.group_size must be one of -1, 32, 64, 128, 256, not 100",),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoint_is_named(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, words = BROKEN[name]
    spoil(folder)
    assert exit_code("generate", str(folder), "x", "--device=cpu") == 2
    assert_one_line(capsys.readouterr().err, *words)


@pytest.fixture
def gone_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make Ray's folder refer to a stopped cluster."""
    # A short path: sockets are put under it.
    with TemporaryDirectory(prefix="ray", dir="/tmp") as name:
        (Path(name) / "ray").mkdir()
        (Path(name) / "ray" / "ray_current_cluster").write_text("192.0.2.2:6379")
        monkeypatch.setenv("RAY_TMPDIR", name)
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("gone_cluster")
@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoint_is_named_by_a_server(folder: Path, name: str) -> None:
    spoil, words = BROKEN[name]
    spoil(folder)
    done = run_pagedray("serve", str(folder), "--device=cpu", "--grpc-port=0", "--http-port=0")
    assert (done.code, done.out) == (2, "")
    assert_one_line(done.err, *words)


@pytest.mark.slow
@pytest.mark.usefixtures("gone_cluster")
def test_ranks_report_a_broken_checkpoint_as_plainly(folder: Path) -> None:
    drop_tensor(folder)
    done = run_pagedray(
        "serve",
        str(folder),
        "--device=cpu",
        "--tensor-parallel-size=2",
        "--grpc-port=0",
        "--http-port=0",
    )
    assert done.code == 2
    assert_one_line(done.err, "model.norm.weight")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tensor-parallel-size=3",), ("local executor", "3")),
        (("--tensor-parallel-size=3", "--executor=ray"), ("3 ranks",)),
        (("--tensor-parallel-size=0",), ("tensor_parallel_size must be 1 or more, not 0",)),
        (("--block-size=0",), ("block_size must be from 1 to 256, not 0",)),
        (("--num-blocks=1",), ("num_blocks must be 2 or more, not 1",)),
        (("--num-blocks=100000000",), ("GiB of host memory", "--num-blocks")),
        (("--num-cpu-blocks=100000000",), ("GiB of host memory", "--num-cpu-blocks")),
        (("--disk-cache-bytes=100000",), ("disk_cache_folder and disk_cache_bytes must be set",)),
        (
            ("--disk-cache-folder=/none", "--disk-cache-bytes=100000"),
            ("Cannot create files in --disk-cache-folder /none: No such file or directory.",),
        ),
        (
            ("--disk-cache-folder=/", "--disk-cache-bytes=100000", "--no-cpu-prefix-cache"),
            ("disk_cache_folder needs the prefix cache",),
        ),
        (("--max-model-len=1000000",), ("max_model_len 1000000", "1024")),
        (("--dtype=float16",), ("float16", "bfloat16")),
        (("--attention-backend=nonsense",), ("nonsense", "torch_sdpa")),
        (("--attention-backend=xformers",), ("xformers", "torch_sdpa")),
        (("--quantization=awq",), ("awq requires a checkpoint in this format", "fp8 only")),
        (("--enable-expert-parallel",), ("enable_expert_parallel", "tiny-llama has none")),
        (("--chat-template=none.jinja",), ("'none.jinja'", "No such file or directory")),
        (("--chat-template={{ x",), ("invalid chat template: unexpected end of template",)),
        (("--frobnicate",), ("--frobnicate",)),
    ],
    ids=lambda value: value[0] if value[0].startswith("--") else "",
)
def test_impossible_option_is_named(
    arguments: tuple[str, ...], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code = exit_code(
        "generate", str(TINY_LLAMA), "x", "--device=cpu", "--executor=local", *arguments
    )
    assert code == 2
    assert_one_line(capsys.readouterr().err, *words)


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        (
            {"quantization_config": GPTQ, "intermediate_size": 768},
            (),
            ("model.layers.0.mlp.down_proj has 768 inputs in groups of 256, which 2 ranks",),
        ),
        (
            {"quantization_config": GPTQ | {"desc_act": True}},
            (),
            ("model.layers.0.self_attn.o_proj", "desc_act", "use one rank"),
        ),
        (
            MIXTRAL | {"num_local_experts": 3},
            ("--enable-expert-parallel",),
            ("3 experts", "2 ranks"),
        ),
        (
            MIXTRAL | {"num_local_experts": 4, "intermediate_size": 511},
            (),
            ("511 columns of each expert", "2 ranks"),
        ),
    ],
)
def test_what_ranks_would_cut_is_named(
    changes: dict[str, Any],  # Any: JSON values
    arguments: tuple[str, ...],
    words: tuple[str, ...],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    edit_config(folder, **changes)
    ranks = ("--executor=ray", "--tensor-parallel-size=2")
    assert exit_code("generate", str(folder), "x", "--device=cpu", *ranks, *arguments) == 2
    assert_one_line(capsys.readouterr().err, *words)


def test_more_ranks_than_devices_are_rejected(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_config(folder, num_attention_heads=512, num_key_value_heads=512, head_dim=4)
    edit_config(folder, intermediate_size=512)
    arguments = ("--device=cpu", "--executor=ray", "--tensor-parallel-size=512")
    assert exit_code("generate", str(folder), "x", *arguments) == 2
    assert_one_line(capsys.readouterr().err, "512", "CPU cores")


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("RAY_TMPDIR", "/dev/null", ("Could not start Ray", "/dev/null", "RAY_TMPDIR")),
        ("RAY_ADDRESS", "127.0.0.1:1", ("No Ray cluster responds", "127.0.0.1:1")),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ("RAY_ADDRESS", "nonsense", ("RAY_ADDRESS", "nonsense")),
                ("RAY_ADDRESS", "ray://127.0.0.1:10001", ("Ray Client", "HOST:PORT")),
            )
        ),
    ],
)
def test_ray_that_cannot_be_used_is_reported(
    variable: str, value: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    done = run_pagedray("generate", str(TINY_LLAMA), "x", "--device=cpu", "--executor=ray")
    assert done.code == 2
    assert_one_line(done.err, *words)


@pytest.mark.usefixtures("gone_cluster")
def test_last_cluster_that_has_stopped_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    done = run_pagedray("generate", str(TINY_LLAMA), "x", "--device=cpu", "--executor=ray")
    assert done.code == 2
    assert_one_line(done.err, "No Ray cluster responds at RAY_ADDRESS auto (192.0.2.2:6379)")


@pytest.mark.parametrize("frontend", ["grpc", "http"])
def test_busy_port_is_named(frontend: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = {"grpc": 0, "http": 0, frontend: port}
        done = run_pagedray(
            "serve",
            str(TINY_LLAMA),
            "--device=cpu",
            f"--grpc-port={ports['grpc']}",
            f"--http-port={ports['http']}",
        )
    assert done.code == 2
    assert_one_line(done.err, str(port))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ("No such file",)),
        ("tenants = 3", ("tenants",)),
        ("[tenants.ann]\nkeys = ['plain text']", ("ann",)),
        ("[tenants.ann]\nkeys = []", ("no key",)),
    ],
)
def test_key_file_that_cannot_be_used_is_named(
    text: str | None, words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.toml"
    if text is not None:
        path.touch(0o600)
        path.write_text(text)
    code = exit_code("serve", str(TINY_LLAMA), "--device=cpu", f"--api-keys={path}")
    assert code == 2
    assert_one_line(capsys.readouterr().err, str(path), *words)


def exit_code(*arguments: str) -> int:
    try:
        return main(arguments)
    except SystemExit as exited:
        # argparse reports errors on the command line.
        return int(exited.code or 0)


def assert_one_line(err: str, *words: str) -> None:
    lines = [line for line in err.splitlines() if not line.endswith(" ...")]
    assert len(lines) == 1, err
    assert "error: " in lines[0]
    for word in words:
        assert word in lines[0]
