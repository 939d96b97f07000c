"""The builder, kernels and limits of the xFormers backend.

Only `library` imports the library, whose name is this folder's: no file here may be run as a
script.
"""

__all__: list[str] = []
