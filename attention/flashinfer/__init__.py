"""The parts of the FlashInfer backend, which starts at `attention.flashinfer.backend`.

Only `decode` and `prefill` import the library, whose name is this folder's: no file here may be
run as a script.
"""

__all__: list[str] = []
