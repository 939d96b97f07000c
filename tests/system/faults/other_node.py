"""Serves on ranks that share no node with the controller, and prints the results.

Prints a line of JSON per placement: the address family of the step channel, the addresses under
which the ranks reach each other, and the tokens. With `hang`, it stops the process of a rank, and
prints whether the tokens were those of an undisturbed run, how much longer they took, how often
ranks were replaced by cause, and whether the process had ended before `ray.kill` was called. With
`lose`, the node of a rank is lost, and another one joins later.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from cluster.engine import rank_channels, ray_executor, ray_ranks
from pagedray import LLM, SamplingParams
from pagedray.errors import DeviceError
from pagedray.node_memory import MemoryAddress
from pagedray.rank_progress import ProgressBoard
from tests.process_ends import still_running


class FarBoard(ProgressBoard):
    """A board that no rank can open, as if each were on another machine."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self.address = MemoryAddress("/nonexistent/board", "")


class WatchedRay:
    """Ray, which notes whether a process had ended at the first call of `kill`."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self.had_ended: bool | None = None

    # Any: whatever Ray's module has.
    def __getattr__(self, name: str) -> Any:
        return getattr(ray, name)

    def kill(self, actor: Any) -> None:  # Any: Ray's handle
        if self.had_ended is None:
            self.had_ended = not still_running([self._process], 60.0)
        ray.kill(actor)


def main(folder: str, mode: str = "") -> None:
    """Generate on ranks of other nodes than this process's."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for address in ("127.0.0.2", "127.0.0.3"):
            cluster.add_node(num_cpus=1, node_ip_address=address)
        ray.init(address=cluster.address, log_to_driver=False)
        match mode:
            case "hang":
                disturb(folder, stop_rank)
            case "lose":
                disturb(folder, lambda llm: replace_node(llm, cluster))
            case _:
                run(folder)
    finally:
        ray.shutdown()
        # Otherwise its address remains, and the next Ray here would connect to a dead cluster.
        cluster.shutdown()


def run(folder: str) -> None:
    """Generate on a rank of another node, fail to place two, and then generate on two nodes."""
    generate(folder, num_ranks=1)
    # No resources become free on these nodes.
    ray_executor._PLACEMENT_TIMEOUT_S = 1.0
    try:
        generate(folder, num_ranks=2)
    except DeviceError as error:
        print(json.dumps(str(error)))
    generate(folder, num_ranks=2, placement_strategy="PACK")


def stop_rank(llm: LLM) -> None:
    """Stop a rank forever."""
    os.kill(ranks_of(llm)._reports.read()[1].pid, signal.SIGSTOP)


def replace_node(llm: LLM, cluster: Cluster) -> None:
    """Kill the node of a rank; another one joins once the cluster knows that it is gone."""
    lost = ranks_of(llm).places.nodes[1]
    (node,) = (one for one in cluster.list_all_nodes() if one.node_id == lost)
    cluster.remove_node(node, allow_graceful=False)
    while any(one["NodeID"] == lost and one["Alive"] for one in ray.nodes()):
        time.sleep(0.5)
    # Meanwhile ranks cannot be started.
    time.sleep(5.0)
    cluster.add_node(num_cpus=1, node_ip_address="127.0.0.4")


def disturb(folder: str, fault: Callable[[LLM], None]) -> None:
    """Inject a fault while two ranks generate."""
    # Into the log of the test: where the seconds go.
    logging.getLogger("cluster").setLevel(logging.INFO)
    logging.basicConfig(format="%(asctime)s %(message)s")
    rank_channels.ProgressBoard = FarBoard  # type: ignore[attr-defined]  # it is imported there
    params = SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True)
    with (
        open_llm(folder, num_ranks=2, placement_strategy="PACK") as llm,
        ThreadPoolExecutor(1) as threads,
    ):

        def generate() -> tuple[tuple[int, ...], float]:
            started_s = time.monotonic()
            (generation,) = llm.generate("import os", params, use_tqdm=False)
            return generation.outputs[0].token_ids, time.monotonic() - started_s

        undisturbed, undisturbed_s = generate()
        watched = WatchedRay(psutil.Process(ranks_of(llm)._reports.read()[1].pid))
        ray_ranks.ray = watched  # type: ignore[assignment,attr-defined]  # in its place
        disturbed = threads.submit(generate)
        time.sleep(0.5)
        fault(llm)
        token_ids, disturbed_s = disturbed.result()
        report = {
            "pause_s": disturbed_s - undisturbed_s,
            "is_equal": token_ids == undisturbed,
            "replacements": llm._engine.stats().replacements,
            "had_ended": watched.had_ended,
        }
        print(json.dumps(report))


def generate(folder: str, *, num_ranks: int, placement_strategy: str = "STRICT_PACK") -> None:
    """Generate a few tokens."""
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with open_llm(folder, num_ranks=num_ranks, placement_strategy=placement_strategy) as llm:
        (generation,) = llm.generate("import os", params, use_tqdm=False)
        # On one machine a Unix socket would also work.
        ranks = ranks_of(llm)
        families = {channel._socket.family.name for channel in ranks._channels._channels}
        report = {
            "families": sorted(families),
            "hosts": ranks.places.hosts,
            "token_ids": generation.outputs[0].token_ids,
        }
        print(json.dumps(report))


def open_llm(folder: str, *, num_ranks: int, placement_strategy: str) -> LLM:
    return LLM(
        folder,
        executor="ray",
        device="cpu",
        dtype="float32",
        num_threads=1,
        tensor_parallel_size=num_ranks,
        placement_strategy=placement_strategy,  # type: ignore[arg-type]  # one of its values
        show_progress=False,
    )


def ranks_of(llm: LLM) -> Any:  # Any: the ranks of Ray's executor
    return llm._engine._executor._ranks  # type: ignore[attr-defined]  # Ray's


if __name__ == "__main__":
    main(*sys.argv[1:])
