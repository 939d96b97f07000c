"""A small random cross-encoder: `LLM.score`, `/rerank` and `/score` against Transformers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForSequenceClassification

from pagedray import LLM
from pagedray.errors import CheckpointError, InvalidRequestError, StartupError
from tests.system.engines import EngineServer
from tests.system.server_process import TINY_LLAMA
from tests.workers.models.encoder_reference import VOCAB_SIZE, save_bert, save_xlm_roberta

QUERY = "w5 w9"
DOCUMENTS = ["w7", "w30 w31 w99 w4", "w5 w9", "w120"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reranker")
    save_xlm_roberta(folder, is_cross_encoder=True)
    words = {f"w{index}": index for index in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="w1 $A w2", pair="w1 $A w2 w2 $B w2", special_tokens=[("w1", 1), ("w2", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def opened(folder: Path, **options: Any) -> LLM:
    return LLM(folder, device="cpu", num_threads=1, show_progress=False, **options)


def expected(folder: Path, *, has_sigmoid: bool = True) -> list[float]:
    """Return what Transformers computes for each document alone."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # Any: the library's types are inconsistent here.
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    scores: list[float] = []
    with torch.inference_mode():
        for document in DOCUMENTS:
            logit = model(torch.tensor([tokenizer.encode(QUERY, document).ids])).logits[0, 0]
            scores.append(float(logit.sigmoid() if has_sigmoid else logit))
    return scores


def test_bert_scores_pairs_with_their_token_types(tmp_path: Path) -> None:
    save_bert(tmp_path, is_cross_encoder=True)
    words = {f"w{index}": index for index in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("w2", 2), ("w1", 1))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    # Any: the library's types are inconsistent here.
    model: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    scores, of_one_type = [], []
    for document in DOCUMENTS:
        pair = tokenizer.encode(QUERY, document)
        ids, types = torch.tensor([pair.ids]), torch.tensor([pair.type_ids])
        with torch.inference_mode():
            scores.append(float(model(ids, token_type_ids=types).logits.sigmoid()))
            of_one_type.append(float(model(ids).logits.sigmoid()))
    assert scores != pytest.approx(of_one_type, abs=1e-3)
    with opened(tmp_path, executor="local") as llm:
        assert llm.score(QUERY, DOCUMENTS) == pytest.approx(scores, abs=1e-5)
        # Sixteen texts that one step scores.
        assert llm.score(QUERY, DOCUMENTS * 4) == pytest.approx(scores * 4, abs=1e-5)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[EngineServer]:
    with EngineServer(folder) as server:
        yield server


@pytest.fixture
def client(server: EngineServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30.0) as client:
        yield client


def test_scores_equal_those_of_transformers(folder: Path) -> None:
    with opened(folder, executor="local") as llm:
        assert llm.score(QUERY, DOCUMENTS) == pytest.approx(expected(folder), abs=1e-5)
        assert llm.score([QUERY, "w1"], ["w7", "w7"])[0] == pytest.approx(expected(folder)[0])
        with pytest.raises(InvalidRequestError, match="one entry per document, 2, not 1"):
            llm.score(["w1"], ["w2", "w3"])
        with pytest.raises(InvalidRequestError, match="does not generate text"):
            llm.generate("w1")
        with pytest.raises(InvalidRequestError, match="requires task"):
            llm.embed("w1")


def test_only_texts_are_scored(folder: Path) -> None:
    with opened(folder, executor="local") as llm:
        # The keys of a dictionary are no documents.
        for documents in (None, 5, b"w7", [b"w7"], ["w7", 5], {"text": "w7"}, [{"text": "w7"}]):
            with pytest.raises(InvalidRequestError, match="documents must be a string or a list"):
                llm.score(QUERY, documents)  # type: ignore[arg-type]  # the mistake under test
        with pytest.raises(InvalidRequestError, match="queries must be a string or a list"):
            llm.score(5, "w7")  # type: ignore[arg-type]  # the mistake under test
        for name, pair in (("queries", ("", "w7")), ("documents", (QUERY, ["w7", ""]))):
            with pytest.raises(InvalidRequestError, match=f"{name} must not have an empty text"):
                llm.score(*pair)
        with pytest.raises(InvalidRequestError, match="instruction must be str, not int"):
            llm.score(QUERY, "w7", instruction=5)  # type: ignore[arg-type]  # as above


@pytest.mark.slow
def test_two_ray_ranks_score_like_transformers(folder: Path, ray_cluster: None) -> None:
    with opened(folder, executor="ray", tensor_parallel_size=2) as llm:
        assert llm.score(QUERY, DOCUMENTS) == pytest.approx(expected(folder), abs=1e-5)


def test_logits_are_scores_if_the_checkpoint_says_so(folder: Path) -> None:
    path = folder / "config.json"
    saved = path.read_text()
    config = json.loads(saved)
    key = "sbert_ce_default_activation_function"
    try:
        path.write_text(json.dumps(config | {key: "torch.nn.modules.linear.Identity"}))
        with opened(folder, executor="local") as llm:
            scores = llm.score(QUERY, DOCUMENTS)
        assert scores == pytest.approx(expected(folder, has_sigmoid=False), abs=1e-5)
        path.write_text(json.dumps(config | {"sentence_transformers": {"activation_fn": "x"}}))
        with pytest.raises(CheckpointError, match=r"sentence_transformers.activation_fn must be"):
            opened(folder)
        path.write_text(json.dumps(config | {"id2label": {"0": "no", "1": "yes"}}))
        with pytest.raises(CheckpointError, match="id2label must have one entry"):
            opened(folder)
    finally:
        path.write_text(saved)
    with pytest.raises(StartupError, match="cannot embed; its task can be score"):
        opened(folder, task="embed")


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_by_their_relevance(client: httpx.Client, folder: Path, path: str) -> None:
    scores = expected(folder)
    documents = [DOCUMENTS[0], *({"text": text} for text in DOCUMENTS[1:])]
    body = {"model": folder.name, "query": QUERY, "documents": documents, "top_n": 3}
    answer = client.post(path, json=body).json()
    order = sorted(range(4), key=lambda index: -scores[index])[:3]
    assert [one["index"] for one in answer["results"]] == order
    for one in answer["results"]:
        assert one["document"] == {"text": DOCUMENTS[one["index"]]}
        assert one["relevance_score"] == pytest.approx(scores[one["index"]], abs=1e-5)
    assert answer["usage"]["total_tokens"] == sum(len(text.split()) + 6 for text in DOCUMENTS)
    plain = client.post(path, json={**body, "return_documents": False}).json()
    assert [set(one) for one in plain["results"]] == [{"index", "relevance_score"}] * 3


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_pairs_are_scored_in_order(client: httpx.Client, folder: Path, path: str) -> None:
    scores = expected(folder)
    for first in (QUERY, [QUERY] * 4):
        body = {"model": folder.name, "text_1": first, "text_2": DOCUMENTS}
        answer = client.post(path, json=body).json()
        assert [one["index"] for one in answer["data"]] == list(range(4))
        assert [one["score"] for one in answer["data"]] == pytest.approx(scores, abs=1e-5)
    one = client.post(path, json={"model": folder.name, "text_1": QUERY, "text_2": "w7"}).json()
    assert [entry["score"] for entry in one["data"]] == pytest.approx(scores[:1], abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/rerank", {"query": "", "documents": ["w1"]}, "query"),
        ("/rerank", {"query": "w1", "documents": []}, "documents"),
        ("/rerank", {"query": "w1", "documents": ["w1", ""]}, "documents.1"),
        ("/rerank", {"query": "w1", "documents": [{"text": "w1", "x": 1}]}, "documents.0.x"),
        ("/rerank", {"query": "w1", "documents": ["w1"] * 2049}, "documents"),
        ("/rerank", {"query": "w1", "documents": ["w1"], "top_n": "1"}, "top_n"),
        ("/rerank", {"query": "w1", "documents": ["w1"], "instruction": "w2"}, "instruction"),
        ("/rerank", {"query": "w1", "documents": ["w1"], "rank_fields": ["x"]}, "rank_fields"),
        ("/rerank", {"query": "w1 " * 60, "documents": ["w1"]}, "documents"),
        ("/score", {"text_1": ["w1", "w2"], "text_2": ["w1"]}, "text_1"),
        ("/score", {"text_1": 5, "text_2": ["w1"]}, "text_1"),
        ("/score", {"text_1": "w1", "text_2": []}, "text_2"),
        ("/score", {"text_1": "w1", "text_2": ["w1", 2]}, "text_2.1"),
        ("/score", {"text_1": "w1"}, "text_2"),
    ],
)
def test_bad_input_is_rejected_by_its_name(
    client: httpx.Client, folder: Path, path: str, body: dict[str, Any], param: str
) -> None:
    content = json.dumps({"model": folder.name, **body})
    answer = client.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_each_model_does_its_own_task(client: httpx.Client, folder: Path) -> None:
    name = folder.name
    for path, body in (("/v1/completions", {"prompt": "w1"}), ("/v1/embeddings", {"input": "w1"})):
        answer = client.post(path, json={"model": name, **body})
        assert answer.status_code == 400
        assert "only scores pairs of texts" in answer.json()["error"]["message"]
    with (
        opened(TINY_LLAMA, executor="local") as llm,
        pytest.raises(InvalidRequestError, match="not a cross-encoder"),
    ):
        llm.score("a", "b")
