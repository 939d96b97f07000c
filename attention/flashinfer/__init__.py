"""The builders, kernels and limits of the FlashInfer and hybrid backends.

Only `decode` and `prefill` import the library. This folder has the library's name, so no file here
may be run as a script.
"""

__all__: list[str] = []
