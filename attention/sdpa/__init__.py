"""The parts of the torch_sdpa backend: on a CPU its plans, and on a GPU what stands in its place.

Starts at `attention.torch_sdpa_backend` on a CPU, and at `gpu_backend` on a GPU.
"""

__all__: list[str] = []
