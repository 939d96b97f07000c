"""Whether a process of Ray answers is also seen while this process can start no threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import count

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from cluster.engine.ray_cluster.ray_daemon import RayDaemon
from tests.fakes import wait_for
from tests.thread_limit import no_more_threads


def test_answers_are_seen_while_no_thread_can_be_started() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    daemon = RayDaemon("Ray", "127.0.0.1", port)
    seconds = count()

    def has_answered(number: int) -> bool:
        daemon.observe(float(next(seconds)))
        return daemon._num_answers >= number

    wait_for(lambda: has_answered(1))
    with no_more_threads():
        wait_for(lambda: has_answered(3))
    assert (daemon.silence_s, daemon.has_ended) == (0.0, False)
    daemon.close()
    server.stop(None).wait()
