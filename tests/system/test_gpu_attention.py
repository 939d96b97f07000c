"""The attention providers of an engine on a GPU, and the memory that it releases when closed."""

from __future__ import annotations

import json
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from pagedray import LLM, SamplingParams
from tests.small_models.checkpoints import save_word_tokenizer
from tests.workers.models.encoder_reference import TEXTS, VOCAB_SIZE, bert_reference, save_bert

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_NUM_LAYERS = 4
_LEFT_BYTES = 512 << 20
"""Memory that libraries keep, such as the workspace of GEMMs."""
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": _NUM_LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
PROVIDERS = {
    "flashinfer": {"prefill": "flashinfer", "prefill_ragged": "flashinfer", "decode": "flashinfer"},
    "xformers": {"prefill": "xformers", "prefill_ragged": "xformers", "decode": "xformers"},
    "torch_sdpa": {"prefill": "shared", "prefill_ragged": "torch", "decode": "shared"},
    "hybrid": {"prefill": "flashinfer", "prefill_ragged": "flashinfer", "decode": "shared"},
}
LIBRARIES = {"flashinfer": "flashinfer", "xformers": "xformers", "hybrid": "flashinfer"}


@pytest.fixture(params=PROVIDERS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    library = LIBRARIES.get(name)
    if library is not None and find_spec(library) is None:
        pytest.skip(f"needs {library}")
    return name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    save_word_tokenizer(tmp_path, 32000)
    return tmp_path


def opened(folder: Path, **options: Any) -> LLM:  # Any: engine options of any type
    return LLM(folder, executor="local", device="cuda", show_progress=False, **options)


def test_engine_logs_its_providers_once(
    folder: Path, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, logger="workers"),
        opened(
            folder, load_format="dummy", attention_backend=backend, max_num_seqs=4, num_blocks=600
        ) as llm,
    ):
        providers = llm.stats().kernels.providers
    assert providers == {part: {name: _NUM_LAYERS} for part, name in PROVIDERS[backend].items()}
    said = [line for line in caplog.messages if line.startswith("Attention:")]
    assert len(said) == len(set(said)) == len(set(PROVIDERS[backend].values()))


def test_closed_engine_releases_its_memory(folder: Path, backend: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    before = torch.cuda.memory_reserved()
    for _ in range(2):
        llm = opened(folder, load_format="dummy", attention_backend=backend, max_num_seqs=8)
        llm.generate([[7] * 100, [9] * 30], params, use_tqdm=False)
        assert torch.cuda.memory_reserved() - before > 2 << 30
        llm.close()
        # `llm` still refers to the closed engine.
        assert torch.cuda.memory_reserved() - before < _LEFT_BYTES


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_embeddings_equal_those_of_transformers(tmp_path: Path, backend: str, pooling: str) -> None:
    save_bert(tmp_path)
    words = {f"w{index}": index for index in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="w1 $A w2", special_tokens=[("w1", 1), ("w2", 2)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    # FlashInfer and xFormers support 16-bit types only.
    dtype = "float32" if backend == "torch_sdpa" else "bfloat16"
    limit = 1e-4 if dtype == "float32" else 2e-2
    take = {"mean": lambda h: h.mean(0), "cls": lambda h: h[0], "last": lambda h: h[-1]}
    expected = torch.stack([take[pooling](hidden) for hidden in bert_reference(tmp_path)])
    with opened(tmp_path, attention_backend=backend, dtype=dtype) as llm:
        vectors = llm.embed([text.tolist() for text in TEXTS], pooling=pooling, normalize=False)  # type: ignore[arg-type]  # the stubs are narrower than the library
    difference = (torch.tensor(vectors) - expected).norm(dim=1) / expected.norm(dim=1)
    assert difference.max() < limit
