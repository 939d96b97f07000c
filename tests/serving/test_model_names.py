"""A model with several names: clients may give each, answers have the first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import httpx
import openai
import pytest

from cluster.serving.model_name import with_served_names
from pagedray.errors import StartupError
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.serving.conftest import Server, engine_config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.serving.text.tokenizer import Tokenizer
    from pagedray.config import EngineConfig

NAMES = ("first", "second", "org/third")


class NamedServer(Server):
    def config(self, context: int) -> EngineConfig:
        return with_served_names(super().config(context), (*NAMES, "second"))


@pytest.fixture(scope="module")
def named(tokenizer: Tokenizer) -> Iterator[NamedServer]:
    with NamedServer(tokenizer) as server:
        yield server


def test_clients_may_give_each_name(named: NamedServer) -> None:
    with openai.OpenAI(base_url=f"{named.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == list(NAMES)
        for name in NAMES:
            assert client.models.retrieve(name).id == name
            completion = client.completions.create(model=name, prompt="a", max_tokens=1)
            assert completion.model == "first"
    messages = {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    answer = httpx.post(f"{named.url}/v1/messages", json={"model": "second", **messages})
    assert answer.json()["model"] == "first"


def test_grpc_clients_may_give_each_name(named: NamedServer) -> None:
    with grpc.insecure_channel(named.grpc_target) as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        models = stub.ListModels(pb.ListModelsRequest()).models
        assert [model.name for model in models] == list(NAMES)
        for name in NAMES:
            sampling = pb.SamplingParams(max_tokens=1)
            list(stub.Generate(pb.GenerateRequest(model=name, text="a", sampling=sampling)))
        with pytest.raises(grpc.RpcError, match="serves 'first', 'second' or 'org/third'"):
            list(stub.Generate(pb.GenerateRequest(model="tiny", text="a")))


def test_other_names_are_rejected(named: NamedServer) -> None:
    body = {"model": "tiny", "prompt": "a"}
    answer = httpx.post(f"{named.url}/v1/completions", json=body)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == (
        "The model 'tiny' does not exist; this server serves 'first', 'second' or 'org/third'."
    )


def test_a_model_keeps_its_name_without_others() -> None:
    config = engine_config()
    assert with_served_names(config, ()) is config
    with pytest.raises(StartupError, match="served_model_name must not be empty"):
        with_served_names(config, ("a", ""))
