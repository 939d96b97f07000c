"""Responses of the Responses API are kept by one of the replicas."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest

from tests.system.serve_cluster import ServeCluster
from tests.system.serve_faults import (
    kill_one,
    until_whole,
)

pytestmark = pytest.mark.slow


def kept_on_both(client: openai.OpenAI) -> dict[str, str]:
    """Return the id of a response of each replica, by the replica's name in it."""
    kept: dict[str, str] = {}
    for number in range(64):
        made = client.responses.create(
            model="tiny-llama",
            input="Hello",
            max_output_tokens=4,
            extra_headers={"X-Session-Id": f"session {number}"},
        )
        kept[made.id.split("_")[1]] = made.id
        if len(kept) == 2:
            return kept
    raise AssertionError("All sessions went to one replica.")


def test_responses_are_found_on_any_replica(cluster: ServeCluster, client: openai.OpenAI) -> None:
    names = {one.split("#")[-1] for one in cluster.replica_pids()}
    kept = kept_on_both(client)
    assert kept.keys() == names
    for name, response_id in kept.items():
        continued = {
            client.responses.create(
                model="tiny-llama",
                input="Go on.",
                previous_response_id=response_id,
                max_output_tokens=4,
                extra_headers={"X-Session-Id": f"replica-{other}"},
            ).id.split("_")[1]
            for other in names
        }
        assert continued == names
        # Without a session it goes where it is kept, unless the load is uneven.
        other = client.responses.create(
            model="tiny-llama", input="And?", previous_response_id=response_id, max_output_tokens=4
        )
        assert other.usage is not None
        assert other.usage.input_tokens > 10
        for _ in range(4):
            assert client.responses.retrieve(response_id).id == response_id
        client.responses.delete(response_id)
        for _ in range(4):
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(response_id)
        assert name in names


async def test_responses_of_a_replica_that_died_are_rejected(
    cluster: ServeCluster, client: openai.OpenAI
) -> None:
    kept = kept_on_both(client)
    killed = next(iter(cluster.replica_pids()))
    lost = killed.split("#")[-1]
    await kill_one(cluster)
    for name, response_id in kept.items():
        given = {"model": "tiny-llama", "input": "Go on.", "previous_response_id": response_id}
        answer = httpx.post(f"{cluster.url}/v1/responses", json=given, timeout=60.0)
        if name != lost:
            assert answer.status_code == 200
            continue
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "previous_response_not_found"
        assert "has ended" in answer.json()["error"]["message"]
    while killed in cluster.replica_pids():
        await asyncio.sleep(0.2)
    await until_whole(cluster, 2)
