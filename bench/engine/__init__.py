"""The engine at the shapes of large models; other benchmarks use its shapes and workloads."""

from bench.engine.shapes import LLAMA_8B, SHAPES, save_model
from bench.engine.workloads import MAX_TOKEN_ID, WORKLOADS, Workload
from bench.records.run_record import write_results

__all__ = [
    "LLAMA_8B",
    "MAX_TOKEN_ID",
    "SHAPES",
    "WORKLOADS",
    "Workload",
    "save_model",
    "write_results",
]
