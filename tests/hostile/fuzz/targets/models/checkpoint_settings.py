"""Files of a checkpoint beside config.json that say how it is used."""

from __future__ import annotations

import json
from pathlib import Path

from cluster.engine.engine_options import sampling_defaults
from cluster.serving.embedding_validator import SentencePrompts, longest_text
from pagedray.errors import CheckpointError
from tests.hostile.fuzz.scratch import scratch_folder
from tests.hostile.fuzz.target import Target, check_message
from workers.models.config_json.sentence_modules import dense_modules

_FOLDER = scratch_folder()
_NAMES = (
    "generation_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)


def run(data: bytes) -> None:
    """Return what the file says that the first byte selects, or CheckpointError."""
    if not data:
        return
    path = Path(_FOLDER, _NAMES[data[0] % len(_NAMES)])
    path.write_bytes(data[1:])
    try:
        sampling_defaults("auto", _FOLDER)
        dense_modules(_FOLDER, 8)
        assert 0 < longest_text(_FOLDER, 512) <= 512
        SentencePrompts.from_folder(_FOLDER).prompt(None)
    except CheckpointError as error:
        check_message(error)
    finally:
        path.unlink()


_MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
_PROMPTS = {"prompts": {"query": "query: ", "passage": ""}, "default_prompt_name": "query"}

TARGET = Target(
    run=run,
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
