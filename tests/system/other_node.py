"""Serves on ranks that share no node with the controller; prints the text they generate."""

from __future__ import annotations

import sys

import ray
from ray.cluster_utils import Cluster

from pagedray import LLM, SamplingParams


def main(folder: str) -> None:
    """Generate a few tokens on a node of its own."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with LLM(folder, executor="ray", device="cpu", num_threads=1, show_progress=False) as llm:
        (generation,) = llm.generate("import os", params, show_progress=False)
        # On one machine a socket in the file system would do as well.
        (channel,) = llm._executor._ranks._channels  # type: ignore[attr-defined]  # Ray's
        print(channel._socket.family.name, len(generation.completions[0].token_ids))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
