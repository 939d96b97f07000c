"""`LLM.embed` on a small random BERT, in this process and on Ray actors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from pagedray import LLM
from pagedray.errors import InvalidRequestError
from tests.system.server_process import TINY_LLAMA
from tests.workers.encoder_reference import TEXTS, VOCAB_SIZE, bert_reference, save_bert

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pagedray.batch import Pooling

PROMPTS = [text.tolist() for text in TEXTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    save_bert(folder)
    words = {f"w{index}": index for index in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="w1 $A w2", special_tokens=[("w1", 1), ("w2", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with opened(folder, executor="local", max_num_batched_tokens=16) as engine:
        yield engine


def opened(folder: Path, **options: Any) -> LLM:
    return LLM(folder, device="cpu", num_threads=1, show_progress=False, **options)


def expected(folder: Path, pooling: Pooling) -> torch.Tensor:
    take = {"mean": lambda h: h.mean(0), "cls": lambda h: h[0], "last": lambda h: h[-1]}
    return torch.stack([take[pooling](hidden) for hidden in bert_reference(folder)])


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_vectors_equal_those_of_transformers(llm: LLM, folder: Path, pooling: Pooling) -> None:
    vectors = torch.tensor(llm.embed(PROMPTS, pooling=pooling, normalize=False))
    assert torch.allclose(vectors, expected(folder, pooling), atol=1e-4, rtol=1e-4)


def test_vectors_do_not_depend_on_the_batch_and_have_length_one(llm: LLM) -> None:
    together = torch.tensor(llm.embed(PROMPTS))
    alone = torch.tensor([llm.embed([prompt])[0] for prompt in PROMPTS])
    assert torch.allclose(together, alone, atol=1e-5)
    assert torch.allclose(together.norm(dim=1), torch.ones(len(PROMPTS)))


def test_texts_get_the_special_tokens_of_their_tokenizer(llm: LLM) -> None:
    assert llm.embed("w5 w9") == llm.embed([[1, 5, 9, 2]])
    assert llm.embed([]) == []


@pytest.mark.parametrize(
    ("prompt", "part"),
    [
        ([], "has 0 tokens, but an encoder reads 1 to 40"),
        ([7] * 41, "has 41 tokens, but an encoder reads 1 to 40"),
        ([3, VOCAB_SIZE], "token id 131, but ids are 0 to 130"),
        ("w1 \ud800", "half of a character"),
    ],
)
def test_prompt_that_no_encoder_can_take_is_refused(
    llm: LLM, prompt: str | list[int], part: str
) -> None:
    with pytest.raises(InvalidRequestError, match=part):
        llm.embed(prompt if isinstance(prompt, str) else [prompt])


def test_unknown_pooling_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="one of mean, cls, last, not 'max'"):
        llm.embed("w1", pooling="max")  # type: ignore[arg-type]  # the mistake under test


def test_encoder_does_not_generate_and_decoder_does_not_embed(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="is an encoder"):
        llm.generate("w1")
    with (
        opened(TINY_LLAMA, executor="local") as decoder,
        pytest.raises(InvalidRequestError, match="only an encoder"),
    ):
        decoder.embed("x")


def test_two_ray_ranks_embed_like_transformers(folder: Path) -> None:
    with opened(folder, executor="ray", tensor_parallel_size=2) as llm:
        vectors = torch.tensor(llm.embed(PROMPTS, normalize=False))
        again = torch.tensor(llm.embed(PROMPTS, normalize=False))
    assert torch.allclose(vectors, expected(folder, "mean"), atol=1e-4, rtol=1e-4)
    assert torch.equal(vectors, again)
