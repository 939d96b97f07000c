"""A small random BERT: `LLM.embed` in this process and on Ray actors, and over both frontends."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn import functional
from transformers import AutoModel, PreTrainedTokenizerFast

from pagedray import LLM
from pagedray.batch import Pooling
from pagedray.errors import CheckpointError, InvalidRequestError
from pagedray.v1 import pagedray_pb2, pagedray_pb2_grpc
from tests.system.engines import EngineServer, rank_processes
from tests.system.server_process import TINY_LLAMA
from tests.workers.models.encoder_reference import (
    TEXTS,
    VOCAB_SIZE,
    bert_reference,
    save_bert,
    save_embedding_gemma,
    with_dense,
)

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
    "prompts",
    [
        [1, 5, 9, 2],
        {"prompt": "w5 w9"},
        torch.tensor([1, 5, 9, 2]),
        [{"prompt_token_ids": [1, 5, 9, 2]}],
        torch.tensor([[1, 5, 9, 2]]),
    ],
)
def test_prompts_have_the_forms_of_generate(llm: LLM, prompts: Any) -> None:
    assert llm.embed(prompts) == llm.embed("w5 w9")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("num_kept", [3, 4, 39, 40, 60])
def test_texts_are_truncated_as_by_transformers(
    llm: LLM, folder: Path, num_kept: int, side: Any
) -> None:
    text = " ".join(f"w{index}" for index in range(5, 42))
    file = str(folder / "tokenizer.json")
    other = PreTrainedTokenizerFast(tokenizer_file=file, truncation_side=side)
    ids = other(text, truncation=True, max_length=num_kept).input_ids
    given: dict[str, Any] = {"truncate_prompt_tokens": num_kept, "truncation_side": side}
    assert llm.embed(text, **given) == llm.embed([ids])


def test_long_texts_and_token_ids_are_truncated_to_what_the_model_takes(llm: LLM) -> None:
    # More characters than 40 tokens can have.
    words = " ".join(["w5"] * 1000)
    given: dict[str, Any] = {"truncate_prompt_tokens": -1}
    assert llm.embed(words, **given) == llm.embed([[1, *[5] * 38, 2]])
    ids = [5, 9, *[7] * 39, VOCAB_SIZE]
    assert llm.embed([ids], **given) == llm.embed([ids[:40]])
    with pytest.raises(InvalidRequestError, match="token id 131"):
        llm.embed([ids], **given, truncation_side="left")


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"truncate_prompt_tokens": 2}, "3 or more for texts, which have 2 special tokens, not 2"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be -1, or 1 or more, not 0"),
        ({"truncate_prompt_tokens": "5"}, "truncate_prompt_tokens must be an integer"),
        ({"truncation_side": "end"}, "truncation_side must be left or right, not 'end'"),
    ],
)
def test_wrong_truncation_is_rejected(llm: LLM, given: Any, part: str) -> None:
    with pytest.raises(InvalidRequestError, match=part):
        llm.embed("w5", **given)


@pytest.mark.parametrize(
    "prompts", [None, 5, b"ab", [b"ab"], [[1.0]], [["w5"]], [["\ud800"]], {"text": "w5"}]
)
def test_other_values_are_no_prompts(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        llm.embed(prompts)


@pytest.mark.parametrize(
    ("prompt", "part"),
    [
        ([], "prompts must have 1 to 40 tokens, not 0"),
        ([7] * 41, "prompts must have 1 to 40 tokens, not 41"),
        ([3, VOCAB_SIZE], "token id 131, but ids are 0 to 130"),
        ("", "prompts must not have an empty text"),
        ("w1 \ud800", "lone surrogate"),
    ],
)
def test_prompt_that_the_encoder_cannot_take_is_rejected(
    llm: LLM, prompt: str | list[int], part: str
) -> None:
    with pytest.raises(InvalidRequestError, match=part):
        llm.embed(prompt if isinstance(prompt, str) else [prompt])


def test_unknown_pooling_is_rejected(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="one of mean, cls, last, not 'max'"):
        llm.embed("w1", pooling="max")  # type: ignore[arg-type]  # the mistake under test


@pytest.mark.parametrize(
    ("name", "wrong", "kind"), [("normalize", [], "true or false"), ("prompt_name", 5, "str")]
)
def test_options_of_another_type_are_rejected(llm: LLM, name: str, wrong: Any, kind: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} must be {kind}, not"):
        llm.embed("w1", **{name: wrong})
    assert len(llm.embed("w1")) == 1


def test_encoder_does_not_generate_and_decoder_does_not_embed(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="does not generate text"):
        llm.generate("w1")
    with (
        opened(TINY_LLAMA, executor="local") as decoder,
        pytest.raises(InvalidRequestError, match='requires task="embed"'),
    ):
        decoder.embed("x")


def test_decoder_embeds_if_it_is_told_to() -> None:
    prompts = [[5, 9, 70], [7], [8] * 40]
    with opened(TINY_LLAMA, executor="local", task="embed", dtype="float32") as llm:
        vectors = torch.tensor(llm.embed(prompts, normalize=False))
        with pytest.raises(InvalidRequestError, match="does not generate text"):
            llm.generate("x")
    model = AutoModel.from_pretrained(TINY_LLAMA, dtype=torch.float32)
    with torch.inference_mode():
        hidden = [model(torch.tensor([prompt])).last_hidden_state[0, -1] for prompt in prompts]
    assert torch.allclose(vectors, torch.stack(hidden), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_two_ray_ranks_embed_like_transformers_and_so_do_their_successors(
    folder: Path, ray_cluster: None
) -> None:
    with opened(folder, executor="ray", tensor_parallel_size=2) as llm:
        vectors = torch.tensor(llm.embed(PROMPTS, normalize=False))
        rank_processes()[-1].kill()
        again = torch.tensor(llm.embed(PROMPTS, normalize=False))
        assert sum(llm.stats().replacements.values()) == 1
    assert torch.allclose(vectors, expected(folder, "mean"), atol=1e-4, rtol=1e-4)
    assert torch.equal(vectors, again)


def test_pooling_is_read_from_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bert"
    shutil.copytree(folder, copy)
    settings = copy / "1_Pooling" / "config.json"
    settings.parent.mkdir()
    settings.write_text('{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}')
    with opened(copy, executor="local") as llm:
        assert llm.embed(PROMPTS) == llm.embed(PROMPTS, pooling="cls")
    settings.write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(CheckpointError, match="enables pooling_mode_max_tokens"):
        opened(copy, executor="local")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[EngineServer]:
    with EngineServer(folder, max_num_batched_tokens=64) as server:
        yield server


def test_served_encoder_gives_the_same_vectors_on_both_frontends(
    server: EngineServer, folder: Path
) -> None:
    request = pagedray_pb2.EmbedRequest(
        prompts=[{"token_ids": {"ids": prompt}} for prompt in PROMPTS], normalize=False
    )
    with grpc.insecure_channel(server.grpc_target) as channel:
        answer = pagedray_pb2_grpc.GenerationServiceStub(channel).Embed(request, timeout=60.0)
    over_grpc = torch.tensor([list(one.values) for one in answer.embeddings])
    assert torch.allclose(over_grpc, expected(folder, "mean"), atol=1e-4, rtol=1e-4)
    assert answer.num_prompt_tokens == sum(map(len, PROMPTS))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        vectors = client.embeddings.create(model="bert0", input=PROMPTS, dimensions=10)
    over_http = torch.tensor([one.embedding for one in vectors.data])
    cut = over_grpc[:, :10]
    assert torch.allclose(over_http, cut / cut.norm(dim=1, keepdim=True), atol=1e-5)


def test_served_encoder_does_not_generate_and_describes_itself(server: EngineServer) -> None:
    with httpx.Client(base_url=server.url) as http:
        assert http.get("/ready").status_code == 200
        rejected = http.post("/v1/completions", json={"model": "bert0", "prompt": "w1"})
        assert rejected.status_code == 400
        assert "only computes embeddings" in rejected.json()["error"]["message"]
        asked = http.post("/v1/embeddings", json={"model": "bert0", "input": ["w1 w5", "w7"]})
        assert asked.json()["usage"]["prompt_tokens"] == 7
        loads = http.get("/loads").json()
        assert loads["is_ready"] is True
        assert loads["num_prompt_tokens"] >= 7
        assert loads["num_steps"] >= 1
        tokens = http.post("/tokenize", json={"model": "bert0", "prompt": "w5 w9"})
        assert tokens.json()["tokens"] == [1, 5, 9, 2]
        assert "pagedray_healthy 1.0" in http.get("/metrics").text
    with grpc.insecure_channel(server.grpc_target) as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(pagedray_pb2.GenerateRequest(text="w1"), timeout=60.0))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        info = stub.GetServerInfo(pagedray_pb2.GetServerInfoRequest(), timeout=60.0)
    assert "BertModel" in str(info)


def test_linear_layers_after_pooling_change_the_size_of_vectors(tmp_path: Path) -> None:
    save_embedding_gemma(tmp_path, window=6)
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB_SIZE)}))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = AutoModel.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        pooled = [model(torch.tensor([ids])).last_hidden_state[0].mean(0) for ids in PROMPTS]
    vectors = functional.normalize(with_dense(tmp_path, torch.stack(pooled)), dim=1)
    with opened(tmp_path, executor="local", dtype="float32") as engine:
        found = torch.tensor(engine.embed(PROMPTS))
        torch.testing.assert_close(found, vectors, rtol=1e-4, atol=1e-4)
