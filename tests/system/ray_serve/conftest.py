"""Ray Serve with the application of a config file: two replicas for the tests of a module."""

from collections.abc import Iterator

import grpc
import openai
import pytest
from ray.serve.schema import ServeDeploySchema

from pagedray.v1 import pagedray_pb2_grpc
from tests.system.ray_serve.application import LEASE_S, serve_config
from tests.system.serve_cluster import SMALL, ServeCluster
from tests.system.span_collector import SpanCollector


@pytest.fixture(scope="module")
def collector() -> Iterator[SpanCollector]:
    with SpanCollector() as collector:
        yield collector


@pytest.fixture(scope="module")
def cluster(ray_cluster: None, collector: SpanCollector) -> Iterator[ServeCluster]:
    # In float32 a greedy stream has the same tokens however often it is recomputed.
    arguments = {"log_format": "json", "otlp_endpoint": collector.url, "lease_s": LEASE_S}
    arguments |= {"dtype": "float32"}
    with ServeCluster() as cluster:
        cluster.deploy_config(ServeDeploySchema.model_validate(serve_config(SMALL | arguments)))
        yield cluster


@pytest.fixture(scope="module")
def stub(cluster: ServeCluster) -> Iterator[pagedray_pb2_grpc.GenerationServiceStub]:
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        yield pagedray_pb2_grpc.GenerationServiceStub(channel)


@pytest.fixture(scope="module")
def client(cluster: ServeCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client
