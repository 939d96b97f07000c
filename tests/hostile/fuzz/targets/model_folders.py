"""Files of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path

from cluster.engine.engine_options import sampling_defaults
from cluster.serving.embedding_validator import SentencePrompts, longest_text
from cluster.serving.text.template_arguments import ChatMessage, ChatPrompt
from cluster.serving.text.tokenizer import LibraryPanicError, Tokenizer
from pagedray.errors import CheckpointError, InvalidRequestError
from scripts.published_models import published_files
from tests.hostile.fuzz.target import Target, check_message, scratch_folder
from tests.system.server_process import TINY_LLAMA
from workers.hub.mirror import Mirror, parse_location
from workers.models.config_json.sentence_modules import dense_modules
from workers.models.families.registry import FAMILY_BY_NAME, read_model_config
from workers.weights.tensor_entries import read_entries

_CONFIG_FOLDER = scratch_folder()


def run_model_config(data: bytes) -> None:
    """Return a configuration or CheckpointError."""
    Path(_CONFIG_FOLDER, "config.json").write_bytes(data)
    try:
        read_model_config(_CONFIG_FOLDER)
    except CheckpointError as error:
        check_message(error)


_TINY = json.loads((TINY_LLAMA / "config.json").read_text())
_ROPES: tuple[dict[str, object], ...] = (
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
)  # fmt: skip

MODEL_CONFIG = Target(
    run=run_model_config,
    seeds=(
        *(json.dumps({**_TINY, "architectures": [one]}).encode() for one in FAMILY_BY_NAME),
        *(json.dumps({**_TINY, "rope_scaling": one}).encode() for one in _ROPES),
        *(json.dumps(file.config).encode() for file in published_files()),
    ),
    words=(
        *(b"1e308", b"1e999", b"-1", b"0", b"true", b"null", b"[]", b"{}", b"0.5", b"NaN"),
        *(b"9" * 30, b'"sliding_window":', b'"layer_types":', b'"rope_scaling":', b'"head_dim":'),
        *(b'"num_key_value_heads":', b'"torch_dtype":', b'"eos_token_id":', b'"hidden_act":'),
        *(b'"text_config":', b'"is_causal":', b'"llama_4_scaling_beta":', b'"mrope_section":'),
    ),
)


_CHECKPOINT_SETTINGS_FOLDER = scratch_folder()
_NAMES = (
    "generation_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)


def run_checkpoint_settings(data: bytes) -> None:
    """Return what the file says that the first byte selects, or CheckpointError."""
    if not data:
        return
    path = Path(_CHECKPOINT_SETTINGS_FOLDER, _NAMES[data[0] % len(_NAMES)])
    path.write_bytes(data[1:])
    try:
        sampling_defaults("auto", _CHECKPOINT_SETTINGS_FOLDER)
        dense_modules(_CHECKPOINT_SETTINGS_FOLDER, 8)
        assert 0 < longest_text(_CHECKPOINT_SETTINGS_FOLDER, 512) <= 512
        SentencePrompts.from_folder(_CHECKPOINT_SETTINGS_FOLDER).prompt(None)
    except CheckpointError as error:
        check_message(error)
    finally:
        path.unlink()


_MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
_PROMPTS = {"prompts": {"query": "query: ", "passage": ""}, "default_prompt_name": "query"}

CHECKPOINT_SETTINGS = Target(
    run=run_checkpoint_settings,
    seeds=tuple(
        bytes([number]) + json.dumps(one).encode()
        for number, one in enumerate(
            (
                {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1},
                _MODULES,
                {"max_seq_length": 256, "do_lower_case": False},
                _PROMPTS,
            )
        )
    ),
    words=(
        b"1e999",
        b"NaN",
        b"-1",
        b"0",
        b"true",
        b"null",
        b"[[",
        b"\\ud800",
        b"9" * 30,
        b'"Dense"',
    ),
    max_bytes=1024,
)


_QUANTIZATION_CONFIG_FOLDER = scratch_folder()
_CONFIG = json.dumps({**_TINY, "quantization_config": None}).encode()
_ATTENTION = tuple(f"model.layers.27.self_attn.{name}_proj" for name in "qkv")
_EXPERTS = tuple(f"model.layers.27.mlp.{name}_proj" for name in ("gate", "up"))


def run_quantization_config(data: bytes) -> None:
    """Return the formats of some layers, or CheckpointError."""
    section = b'"quantization_config": null'
    assert section in _CONFIG
    Path(_QUANTIZATION_CONFIG_FOLDER, "config.json").write_bytes(
        _CONFIG.replace(section, b'"quantization_config": %b' % data)
    )
    try:
        quantization = read_model_config(_QUANTIZATION_CONFIG_FOLDER).quantization
        if quantization is not None:
            for layers in (_ATTENTION, _EXPERTS):
                quantization.format_of(layers)
    except CheckpointError as error:
        check_message(error)


_FP8_WEIGHTS = {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True}
_FP8_INPUTS = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True}
_INT4_WEIGHTS = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128}
_TENSORS = {"quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*gate$"]}
_SEEDS: tuple[dict[str, object], ...] = (
    {
        **_TENSORS,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": _FP8_WEIGHTS,
                "input_activations": {**_FP8_INPUTS, "symmetric": True},
            }
        },
    },
    {
        **_TENSORS,
        "config_groups": {
            "group_0": {"targets": [r"re:model\.layers\.\d+\.mlp.*"], "weights": _INT4_WEIGHTS},
            "group_1": {
                "targets": ["model.layers.0.self_attn.q_proj"],
                "weights": {**_FP8_WEIGHTS, "strategy": "block", "block_structure": [128, 128]},
                "input_activations": {**_FP8_INPUTS, "strategy": "group", "group_size": 128},
            },
        },
    },
    {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True},
    {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True,
     "modules_to_not_convert": ["model.layers.0", "k_proj"]},
)  # fmt: skip

QUANTIZATION_CONFIG = Target(
    run=run_quantization_config,
    seeds=tuple(json.dumps(one).encode() for one in _SEEDS),
    words=(
        *(b'"re:', b"(a+)+$", b".*.*.*", b"(.|.)*x", b"{99999999999}", b"(?=", b"(?<=", b"\\\\1"),
        *(b"((((", b"[^.]+", b"-1", b"null", b"{}", b"[]", b"1e308", b'"ignore":', b'"targets":'),
        *(b'"group"', b'"tensor"', b'"static"', b'"actorder":"group"', b'"kv_cache_scheme":'),
    ),
    max_bytes=1024,
)


_WEIGHTS_HEADER_FOLDER = scratch_folder()


def run_weights_header(data: bytes) -> None:
    """Return tensors that the file has, or CheckpointError.

    Unless the first byte is 0, the length of the header is put before the rest, and tensors of
    that many bytes after it.
    """
    if not data:
        return
    content = data[1:]
    if data[0]:
        content = len(content).to_bytes(8, "little") + content + bytes(data[0])
    path = Path(_WEIGHTS_HEADER_FOLDER, "model.safetensors")
    path.write_bytes(content)
    try:
        entries = read_entries(_WEIGHTS_HEADER_FOLDER)
    except CheckpointError as error:
        check_message(error)
        return
    assert all(entry.path == path for entry in entries.values())


def _header(**tensors: object) -> bytes:
    return json.dumps(tensors).encode()


_ONE = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}

WEIGHTS_HEADER = Target(
    run=run_weights_header,
    seeds=(
        b"\x0c" + _header(a=_ONE),
        b"\x18"
        + _header(
            __metadata__={"format": "pt"},
            a=_ONE,
            b={"dtype": "F32", "shape": [], "data_offsets": [12, 16]},
            c={"dtype": "F64", "shape": [1], "data_offsets": [16, 24]},
        ),
        b"\x00\x02\x00\x00\x00\x00\x00\x00\x00{}",
        b"\x00\xff\xff\xff\xff\xff\xff\xff\xff",
    ),
    words=(
        *(b'"F16"', b'"I64"', b'"BOOL"', b'"F8_E4M3"', b'"data_offsets":', b'"shape":', b"[0,0]"),
        *(b"18446744073709551616", b"-1", b"1e3", b"true", b'"__metadata__":{"a":"b"},', b"NaN"),
    ),
    max_bytes=1024,
)


_WEIGHTS_INDEX_FOLDER = scratch_folder()
_HEADER = b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}'
Path(_WEIGHTS_INDEX_FOLDER, "x.safetensors").write_bytes(
    len(_HEADER).to_bytes(8, "little") + _HEADER + bytes(4)
)


def run_weights_index(data: bytes) -> None:
    """Return the tensors of the files beside it, or CheckpointError."""
    Path(_WEIGHTS_INDEX_FOLDER, "model.safetensors.index.json").write_bytes(data)
    try:
        entries = read_entries(_WEIGHTS_INDEX_FOLDER)
    except CheckpointError as error:
        check_message(error)
        return
    assert {entry.path.parent for entry in entries.values()} <= {_WEIGHTS_INDEX_FOLDER}


WEIGHTS_INDEX = Target(
    run=run_weights_index,
    seeds=(
        b'{"metadata":{"total_size":4},"weight_map":{"a":"x.safetensors"}}',
        b'{"weight_map":{"a":"../x.safetensors","b":"/etc/passwd"}}',
    ),
    words=(b"../", b"/dev/zero", b"\\u0000", b"\\ud800", b".safetensors", b"x" * 300, b"null"),
    max_bytes=1024,
)


_DOWNLOAD_RECORD_FOLDER = scratch_folder()
_NOTES = Path(_DOWNLOAD_RECORD_FOLDER, ".pagedray")
_NOTES.mkdir()
Path(_DOWNLOAD_RECORD_FOLDER, "config.json").write_bytes(b"{}")


def run_download_record(data: bytes) -> None:
    """Say what is wrong with a folder, or nothing; a name is a bucket and a prefix, or an error."""
    (_NOTES / "files.json").write_bytes(data)
    mirror = Mirror(_DOWNLOAD_RECORD_FOLDER)
    problem = mirror.problem()
    assert problem is None or "\n" not in problem
    mirror.mirrors(())
    try:
        location = parse_location(data.decode("utf-8", "replace"))
    except CheckpointError as error:
        check_message(error)
        return
    assert ".." not in location.prefix
    assert parse_location(str(location)) == location


_RECORD = b'{"files":[{"name":"config.json","size":2,"etag":"x"}],"is_complete":true}'

DOWNLOAD_RECORD = Target(
    run=run_download_record,
    seeds=(_RECORD, b'{"files":[],"is_complete":false}', b"s3://models/a/b-1.0=x/"),
    words=(
        b'"name"',
        b'"size"',
        b'"etag"',
        b"null",
        b"\\u0000",
        b"\\ud800",
        b"1e999",
        b"s3://a.b/",
    ),
    max_bytes=512,
)


_TOKENIZER_FOLDER_FOLDER = scratch_folder()
_TOKENIZER_NAMES = ("tokenizer.json", "tokenizer_config.json")


def _vocabulary(*tokens: str) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def _added(number: int, content: str) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **flags, "special": True}


def _sequence(name: str, number: int) -> dict[str, object]:
    return {"Sequence": {"id": name, "type_id": number}}


_BPE = {
    "version": "1.0",
    "added_tokens": [_added(0, "<s>")],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, _sequence("A", 0)],
        "pair": [_sequence("A", 0), _sequence("B", 1)],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    },
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "vocab": _vocabulary("<s>", "a", "b", "ab"), "merges": ["a b"]},
}
_WORDS = {
    "version": "1.0",
    "truncation": {"max_length": 8, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
    "added_tokens": [],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]},
    "pre_tokenizer": {
        "type": "Split",
        "pattern": {"Regex": "\\s+"},
        "behavior": "Removed",
        "invert": False,
    },
    "model": {"type": "WordLevel", "vocab": _vocabulary("a", "b", "?"), "unk_token": "?"},
}
_SETTINGS = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "lstrip": False},
    "added_tokens_decoder": {"4": {"content": "</s>", "special": True}, "5": {"content": "<x>"}},
    "additional_special_tokens": ["<y>"],
    "chat_template": "{{ bos_token }}{% for one in messages %}{{ one.content }}{% endfor %}",
}


def run_tokenizer_folder(data: bytes) -> None:
    """Return token ids, or a documented error, with the file that the first byte selects."""
    if not data:
        return
    place = data[0] % len(_TOKENIZER_NAMES)
    Path(_TOKENIZER_FOLDER_FOLDER, _TOKENIZER_NAMES[place]).write_bytes(data[1:])
    if place:
        Path(_TOKENIZER_FOLDER_FOLDER, _TOKENIZER_NAMES[0]).write_text(json.dumps(_BPE))
    else:
        Path(_TOKENIZER_FOLDER_FOLDER, _TOKENIZER_NAMES[1]).unlink(missing_ok=True)
    try:
        tokenizer = Tokenizer.from_folder(_TOKENIZER_FOLDER_FOLDER)
    except CheckpointError as error:
        check_message(error)
        return
    try:
        marked = tokenizer.render_marked_chat(
            ChatPrompt((ChatMessage(role="user", content="ab <s> \u00e9"),)),
            marks_special_tokens=True,
        )
        tokenizer.decode(tokenizer.encode_marked(marked))
        tokenizer.decode(tokenizer.encode("ab ba\n"))
    except (InvalidRequestError, LibraryPanicError):
        return
    # The library raises no more specific error for a tokenizer that its file describes wrongly.
    except Exception as error:
        if type(error) is not Exception:
            raise


TOKENIZER_FOLDER = Target(
    run=run_tokenizer_folder,
    seeds=(
        b"\x00" + json.dumps(_BPE).encode(),
        b"\x00" + json.dumps(_WORDS).encode(),
        b"\x01" + json.dumps(_SETTINGS).encode(),
    ),
    words=(
        *(b'"Unigram"', b'"WordPiece"', b'"ByteFallback"', b'"Metaspace"', b'"Replace"', b'"Fuse"'),
        *(b'"Strip"', b'"Precompiled"', b'"Prepend"', b'"Sequence"', b"4294967295", b"-1", b"null"),
        *(b'"byte_fallback":true', b'"continuing_subword_prefix":"##"', b"(a+)+$", b"{{", b"{%"),
    ),
)
