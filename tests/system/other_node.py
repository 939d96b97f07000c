"""Serves on ranks that share no node with the controller, and prints the results.

Prints a line of JSON per placement: the address family of the step channel, the addresses under
which the ranks reach each other, and the tokens.
"""

from __future__ import annotations

import json
import sys

import ray
from ray.cluster_utils import Cluster

from cluster.engine.ranks import ray_executor
from pagedray import LLM, SamplingParams
from pagedray.errors import DeviceError


def main(folder: str) -> None:
    """Generate on a rank of another node, and then on ranks of two other nodes."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for address in ("127.0.0.2", "127.0.0.3"):
            cluster.add_node(num_cpus=1, node_ip_address=address)
        ray.init(address=cluster.address, log_to_driver=False)
        run(folder)
    finally:
        ray.shutdown()
        # Otherwise its address remains, and the next Ray here would connect to a dead cluster.
        cluster.shutdown()


def run(folder: str) -> None:
    """Generate on one rank, and fail to place two."""
    generate(folder, num_ranks=1)
    # No resources become free on these nodes.
    ray_executor._PLACEMENT_TIMEOUT_S = 1.0
    try:
        generate(folder, num_ranks=2)
    except DeviceError as error:
        print(json.dumps(str(error)))
    generate(folder, num_ranks=2, placement_strategy="PACK")


def generate(folder: str, *, num_ranks: int, placement_strategy: str = "STRICT_PACK") -> None:
    """Generate a few tokens."""
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with LLM(
        folder,
        executor="ray",
        device="cpu",
        dtype="float32",
        num_threads=1,
        tensor_parallel_size=num_ranks,
        placement_strategy=placement_strategy,
        show_progress=False,
    ) as llm:
        (generation,) = llm.generate("import os", params, show_progress=False)
        # On one machine a Unix socket would also work.
        ranks = llm._engine._executor._ranks  # type: ignore[attr-defined]  # Ray's
        families = {channel._socket.family.name for channel in ranks._channels._channels}
        report = {
            "families": sorted(families),
            "hosts": ranks.places.hosts,
            "token_ids": generation.completions[0].token_ids,
        }
        print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
