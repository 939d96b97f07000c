"""The parts of the xFormers backend, which starts at `attention.xformers.backend`.

Only `library` imports the library, whose name is this folder's: no file here may be run as a
script.
"""

__all__: list[str] = []
