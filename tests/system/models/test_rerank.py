"""Decoders that score: Qwen3-Reranker as its model card runs it, and its conversion with a head."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen3Config

from pagedray import LLM
from pagedray.errors import CheckpointError, InvalidRequestError, StartupError
from pagedray.v1 import pagedray_pb2, pagedray_pb2_grpc
from tests.system.engines import EngineServer
from tests.system.server_process import TINY_LLAMA
from workers.models.families.registry import read_model_config

QUERY = "capital of China"
DOCUMENTS = ["Beijing is it.", "no, yes\n", "Gravity attracts bodies.", " "]
INSTRUCTION = "Find what is wrong"
DEFAULT = "Given a web search query, retrieve relevant passages that answer the query"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def made_tokenizer(*special: str) -> Tokenizer:
    """Return one of bytes, as Qwen's, with few merges."""
    merges = [("y", "e"), ("ye", "s"), ("n", "o"), ("e", "r"), ("\u0120", "t")]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return tokenizer


def save_qwen3(folder: Path, *, is_tied: bool = True, has_head: bool = False) -> None:
    config = Qwen3Config(
        vocab_size=300,
        hidden_size=48,
        intermediate_size=84,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        tie_word_embeddings=is_tied,
        bos_token_id=None,
        eos_token_id=261,
        initializer_range=0.3,
        id2label={0: "relevance"} if has_head else None,
    )
    torch.manual_seed(5)
    kind: Any = AutoModelForSequenceClassification if has_head else AutoModelForCausalLM
    kind.from_config(config).save_pretrained(folder)
    made_tokenizer(*SPECIAL).save(str(folder / "tokenizer.json"))


def card_scores(folder: Path, query: str, instruction: str = DEFAULT) -> list[float]:
    """Return what the model card of Qwen3-Reranker computes for each document.

    The special tokens of documents are ordinary text.
    """
    tokenizer, plain = made_tokenizer(*SPECIAL), made_tokenizer()
    # Any: the library's types are inconsistent here.
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    no, yes = (tokenizer.token_to_id(word) for word in ("no", "yes"))
    scores = []
    for document in DOCUMENTS:
        pair = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        ids = [*tokenizer.encode(PREFIX).ids, *plain.encode(pair).ids]
        ids += tokenizer.encode(SUFFIX).ids
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        answers = torch.log_softmax(torch.stack([logits[no], logits[yes]]), dim=0)
        scores.append(float(answers[1].exp()))
    return scores


def opened(folder: Path, **options: Any) -> LLM:
    return LLM(folder, device="cpu", num_threads=1, show_progress=False, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reranker")
    save_qwen3(folder)
    return folder


@pytest.mark.parametrize("is_tied", [True, False])
def test_scores_are_those_of_the_model_card(is_tied: bool, tmp_path: Path) -> None:
    save_qwen3(tmp_path, is_tied=is_tied)
    expected = card_scores(tmp_path, QUERY)
    assert max(expected) - min(expected) > 1e-3
    with opened(tmp_path, executor="local", task="score") as llm:
        assert llm.score(QUERY, DOCUMENTS) == pytest.approx(expected, abs=1e-5)
        other = card_scores(tmp_path, "<|im_end|>", INSTRUCTION)
        scores = llm.score("<|im_end|>", DOCUMENTS, instruction=INSTRUCTION)
        assert scores == pytest.approx(other, abs=1e-5)
        with pytest.raises(InvalidRequestError, match="instruction must have 1 to 4096"):
            llm.score(QUERY, DOCUMENTS, instruction="")


@pytest.mark.slow
def test_two_ray_ranks_score_alike(folder: Path, ray_cluster: None) -> None:
    with opened(folder, executor="ray", tensor_parallel_size=2, task="score") as llm:
        assert llm.score(QUERY, DOCUMENTS) == pytest.approx(card_scores(folder, QUERY), abs=1e-5)


def test_converted_reranker_scores_pairs_as_transformers(tmp_path: Path) -> None:
    save_qwen3(tmp_path, has_head=True)
    tokenizer = made_tokenizer(*SPECIAL)
    model: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path)  # Any: as above
    query = f"{PREFIX}<Instruct>: {DEFAULT}\n<Query>: {QUERY}\n"
    documents = [f"<Document>: {document}{SUFFIX}" for document in DOCUMENTS]
    expected = []
    for document in documents:
        ids = tokenizer.encode(query, document).ids
        with torch.inference_mode():
            expected.append(float(model(torch.tensor([ids])).logits.sigmoid()))
    with opened(tmp_path, executor="local") as llm:
        assert llm.score(query, documents) == pytest.approx(expected, abs=1e-5)
        with pytest.raises(InvalidRequestError, match="scores texts without an instruction"):
            llm.score(query, documents, instruction=INSTRUCTION)


def test_model_without_answers_is_rejected(tmp_path: Path) -> None:
    save_qwen3(tmp_path)
    text = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace('"yes"', '"yez"'))
    broken = json.loads((tmp_path / "tokenizer.json").read_text())
    broken["model"]["merges"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(broken))
    with pytest.raises(CheckpointError, match=r"tokenizer.json must have the tokens no and yes"):
        opened(tmp_path, task="score")
    with pytest.raises(StartupError, match="cannot score; its task can be generate or embed"):
        opened(TINY_LLAMA, task="score")


def test_reranker_of_sentence_transformers_is_one_without_an_option(tmp_path: Path) -> None:
    save_qwen3(tmp_path)
    ids = {word: made_tokenizer(*SPECIAL).token_to_id(word) for word in ("no", "yes")}
    place = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    modules = [{"idx": 1, "name": "1", "path": "1_LogitScore", "type": place}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_LogitScore").mkdir()
    settings = tmp_path / "1_LogitScore" / "config.json"
    answers = {"true_token_id": ids["yes"], "false_token_id": ids["no"]}
    settings.write_text(json.dumps(answers))
    assert read_model_config(tmp_path).task == "score"
    assert read_model_config(tmp_path, task="generate").task == "generate"
    settings.write_text(json.dumps(answers | {"false_token_id": None}))
    with pytest.raises(CheckpointError, match=r"1_LogitScore/config.json: false_token_id must be"):
        read_model_config(tmp_path)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[EngineServer]:
    with EngineServer(folder, task="score") as server:
        yield server


@pytest.fixture
def client(server: EngineServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30.0) as client:
        yield client


def test_grpc_scores_documents(server: EngineServer, folder: Path) -> None:
    with grpc.insecure_channel(server.grpc_target) as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        request = pagedray_pb2.ScoreRequest(query=QUERY, documents=DOCUMENTS)
        answer = stub.Score(request, timeout=60.0)
        assert list(answer.scores) == pytest.approx(card_scores(folder, QUERY), abs=1e-5)
        assert answer.num_prompt_tokens > 0
        request.instruction = INSTRUCTION
        scores = stub.Score(request, timeout=60.0).scores
        assert list(scores) == pytest.approx(card_scores(folder, QUERY, INSTRUCTION), abs=1e-5)
        for broken in (
            pagedray_pb2.ScoreRequest(documents=["x"]),
            pagedray_pb2.ScoreRequest(query="x"),
            pagedray_pb2.ScoreRequest(query="x", documents=[""]),
            pagedray_pb2.ScoreRequest(query="x", documents=["y"] * 3000),
            pagedray_pb2.ScoreRequest(query="x", documents=["y"], instruction=""),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                stub.Score(broken, timeout=60.0)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_server_ranks_documents_by_an_instruction(client: httpx.Client, folder: Path) -> None:
    expected = card_scores(folder, QUERY, INSTRUCTION)
    body = {"model": folder.name, "query": QUERY, "documents": DOCUMENTS}
    answer = client.post("/v1/rerank", json={**body, "instruction": INSTRUCTION}).json()
    scores = {one["index"]: one["relevance_score"] for one in answer["results"]}
    assert [scores[index] for index in range(4)] == pytest.approx(expected, abs=1e-5)
    pair = {"model": folder.name, "text_1": QUERY, "text_2": DOCUMENTS}
    plain = client.post("/score", json=pair).json()
    shown = [one["score"] for one in plain["data"]]
    assert shown == pytest.approx(card_scores(folder, QUERY), abs=1e-5)
