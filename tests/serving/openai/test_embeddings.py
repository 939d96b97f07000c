"""Embeddings and tokens over HTTP."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import openai
import pytest
import tokenizers

from tests.serving.conftest import Server, engine_config
from tests.serving.fake_engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from cluster.engine.embedding_scheduler import EmbeddingRequest
    from cluster.serving.text.tokenizer import Tokenizer
    from pagedray.config import EngineConfig

HIDDEN_SIZE = 8

MESSAGE = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "look"}}


class FakeEncoder(FakeEngine):
    """Embeds each text as its first token and its length."""

    def submit_texts(self, texts: EmbeddingRequest) -> Future[NDArray[np.float32]]:
        rows = [[ids[0], len(ids), 0.1, *[0.5] * (HIDDEN_SIZE - 3)] for ids in texts.texts]
        future: Future[NDArray[np.float32]] = Future()
        future.set_result(np.array(rows, dtype=np.float32)[:, : texts.size])
        return future


class EncoderServer(Server):
    """Frontends over an encoder."""

    def config(self, context: int) -> EngineConfig:
        config = engine_config(context)
        model = dataclasses.replace(
            config.model, architecture="BertModel", is_encoder=True, task="embed"
        )
        return dataclasses.replace(config, model=model)

    def attach(self) -> None:
        self.engine = FakeEncoder(self.client, self.script)
        self.client.attach_engine(self.engine)


@pytest.fixture(scope="module")
def encoder(tokenizer: Tokenizer) -> Iterator[EncoderServer]:
    with EncoderServer(tokenizer) as server:
        yield server


@pytest.fixture
def client(encoder: EncoderServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{encoder.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_pooling_has_the_vectors_of_embeddings(encoder: EncoderServer) -> None:
    for more in ({}, {"encoding_format": "base64", "dimensions": 4}):
        body = {"model": "tiny", "input": ["hello", "large"], **more}
        pooled = httpx.post(f"{encoder.url}/pooling", json=body).json()
        embedded = httpx.post(f"{encoder.url}/v1/embeddings", json=body).json()
        assert [one["object"] for one in pooled["data"]] == ["pooling"] * 2
        assert [one["data"] for one in pooled["data"]] == [
            one["embedding"] for one in embedded["data"]
        ]
        assert pooled["usage"] == embedded["usage"]


def test_vectors_come_in_order_in_both_encodings(
    client: openai.OpenAI, tokenizer: Tokenizer
) -> None:
    texts = ["hello", "a b c"]
    # The client requests base64 by default.
    packed = client.embeddings.create(model="tiny", input=texts)
    plain = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    lengths = [len(tokenizer.encode(text)) for text in texts]
    for answer in (packed, plain):
        assert [one.index for one in answer.data] == [0, 1]
        assert [one.embedding[1] for one in answer.data] == lengths
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(lengths)
        assert answer.data[0].embedding[2] == pytest.approx(0.1)
    assert len(packed.data[0].embedding) == HIDDEN_SIZE


@pytest.mark.parametrize("given", ["hello", [7, 8, 9], [[7, 8], [9]]])
def test_texts_and_token_ids_are_accepted(
    client: openai.OpenAI, given: Any
) -> None:  # Any: a union
    answer = client.embeddings.create(model="tiny", input=given, dimensions=2)
    assert len(answer.data) == (2 if given == [[7, 8], [9]] else 1)
    assert all(len(one.embedding) == 2 for one in answer.data)
    if given != "hello":
        assert answer.data[0].embedding[0] == 7


@pytest.mark.parametrize("path", ["v1/embeddings", "pooling"])
def test_texts_and_token_ids_are_truncated(encoder: EncoderServer, path: str) -> None:
    ids = [7, 8, 9]
    for side, first in ((None, 7), ("right", 7), ("left", 8)):
        body = {"input": ids, "truncate_prompt_tokens": 2, "truncation_side": side}
        answer = httpx.post(f"{encoder.url}/{path}", json=body).json()
        (one,) = answer["data"]
        assert (one.get("embedding") or one["data"])[:2] == [first, 2]
        assert answer["usage"]["prompt_tokens"] == 2
    # The context has 256 tokens, the first of which is special.
    body = {"input": "x" * 260_000, "truncate_prompt_tokens": -1, "truncation_side": "left"}
    (one,) = httpx.post(f"{encoder.url}/{path}", json=body).json()["data"]
    assert (one.get("embedding") or one["data"])[:2] == [0, 256]


def test_values_of_vllm_without_effect_are_accepted(client: openai.OpenAI) -> None:
    more = {"priority": 0, "add_special_tokens": True, "truncate_prompt_tokens": None}
    client.embeddings.create(model="tiny", input="hello", extra_body=more)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 5]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": [999]}, "input"),
        ({"input": "x" * 100_000}, "input"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "dimensions": 9}, "dimensions"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "x", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
        ({"input": "x", "truncation_side": "end"}, "truncation_side"),
        ({"input": "x" * 270_000, "truncate_prompt_tokens": 5}, "input"),
        ({"input": "x", "priority": 1}, "priority"),
    ],
)
def test_bad_bodies_are_rejected(encoder: EncoderServer, body: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{encoder.url}/v1/embeddings", json={"model": "tiny", **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_encoder_does_not_generate_and_decoder_does_not_embed(
    client: openai.OpenAI, openai_client: openai.OpenAI
) -> None:
    with pytest.raises(openai.APIStatusError) as rejected:
        client.completions.create(model="tiny", prompt="x")
    assert rejected.value.status_code < 500
    with pytest.raises(openai.APIStatusError) as rejected:
        openai_client.embeddings.create(model="tiny", input="x")
    assert rejected.value.status_code < 500
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="x")


def test_detokenize_inverts_tokenize(http: httpx.Client, tokenizer: Tokenizer) -> None:
    text = "The quick h\u00e9llo"
    answer = http.post("/tokenize", json={"model": "tiny", "prompt": text}).json()
    assert answer["tokens"] == tokenizer.encode(text)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 256)
    back = http.post("/detokenize", json={"model": "tiny", "tokens": answer["tokens"]})
    assert back.json() == {"prompt": f"<s>{text}"}
    bare = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert bare["tokens"] == answer["tokens"][1:]


def test_tokens_are_spelled_as_in_the_vocabulary(http: httpx.Client, folder: Path) -> None:
    text = "The quick h\u00e9llo"
    whole = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text)
    body = {"prompt": text, "return_token_strs": True}
    answer = http.post("/tokenize", json=body).json()
    assert (answer["tokens"], answer["token_strs"]) == (whole.ids, whole.tokens)
    assert http.post("/tokenize", json={"prompt": text}).json()["token_strs"] is None


@pytest.mark.parametrize("given", [{"prompt": "hi"}, {"messages": [MESSAGE]}])
def test_empty_lists_ask_for_nothing(http: httpx.Client, given: dict[str, Any]) -> None:
    # The template reads no documents.
    answers = [http.post("/tokenize", json=given | {"tools": [], "documents": []})]
    answers.append(http.post("/tokenize", json=given))
    assert answers[0].json()["tokens"] == answers[1].json()["tokens"]


def test_tokens_of_a_conversation(http: httpx.Client, tokenizer: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}
    answer = http.post("/tokenize", json=body).json()
    assert answer["tokens"] == tokenizer.encode("<s><|user|>hi</s>", add_special_tokens=False)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("tokenize", {"prompt": 5}, "prompt"),
        ("tokenize", {"prompt": "x" * 1_000_000}, "prompt"),
        ("tokenize", {"messages": []}, "messages"),
        ("tokenize", {"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("tokenize", {"prompt": "x", "documents": [{}]}, "documents"),
        ("tokenize", {"messages": [MESSAGE], "documents": [{}]}, "documents"),
        ("tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("tokenize", {"messages": [MESSAGE], "tools": [TOOL, TOOL]}, "tools"),
        ("detokenize", {}, "tokens"),
        ("detokenize", {"tokens": ["a"]}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens"),
        ("detokenize", {"tokens": [5] * 100_000}, "tokens"),
    ],
)
def test_bad_tokens_are_rejected(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    answer = http.post(f"/{path}", json=body)
    assert answer.status_code == (404 if param == "model" else 400)
    assert answer.json()["error"]["param"] == param
