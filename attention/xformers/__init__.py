"""The builder, kernels and limits of the xFormers backend.

Only `library` imports the library. This folder has the library's name, so no file here may be run
as a script.
"""

__all__: list[str] = []
