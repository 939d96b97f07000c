"""The modules that sentence-transformers runs after a model, as `modules.json` lists them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from pagedray.files import has_file
from pagedray.model_config import DenseModule
from workers.models.config_json.config_file import ConfigFile, check_all_read
from workers.models.config_json.family import MAX_SIZE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["dense_modules"]

_SUPPORTED = ("Transformer", "Pooling", "Dense", "Normalize")
"""The modules that run, in the order that they must have."""
_ACTIVATIONS: Mapping[str, Literal["identity", "tanh"]] = {
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.linear.Identity": "identity",
}
_FOLDER_NAME = re.compile(r"\d+_\w+", re.ASCII)
_EMBEDDING = "sentence_embedding"


def dense_modules(folder: Path, size: int) -> tuple[DenseModule, ...]:
    """Return the linear layers that change pooled vectors of a size.

    Raises CheckpointError for modules that would change vectors and are not supported.
    """
    found = []
    for module, kind in _modules(folder):
        if kind == "Dense":
            found.append(_dense_module(folder, module, size))
            size = found[-1].out_size
    return tuple(found)


def _modules(folder: Path) -> list[tuple[ConfigFile, str]]:
    """Return the modules of a folder, each with the name of its class."""
    path = folder / "modules.json"
    if not has_file(path):
        return []
    modules = [(one, one.word("type").rpartition(".")[2]) for one in ConfigFile.read_list(path)]
    last = _SUPPORTED[0]
    for module, kind in modules:
        if kind not in _SUPPORTED:
            raise module.rejection(
                "type",
                f"names the module {kind[:40]!r}; supported modules are {', '.join(_SUPPORTED)}",
            )
        if _SUPPORTED.index(kind) < _SUPPORTED.index(last):
            raise module.rejection(
                "type", f"names {kind} after {last}; the order must be {', '.join(_SUPPORTED)}"
            )
        last = kind
    return modules


def _dense_module(folder: Path, module: ConfigFile, in_size: int) -> DenseModule:
    name = module.word("path")
    if not _FOLDER_NAME.fullmatch(name):
        raise module.rejection("path", f"must be a folder such as 2_Dense, not {name[:60]!r}")
    file = ConfigFile.read(folder / name / "config.json")
    file.reject_unless("in_features", in_size)
    for key in ("module_input_name", "module_output_name"):
        file.choice(key, (_EMBEDDING,), _EMBEDDING)
    dense = DenseModule(
        folder=name,
        in_size=in_size,
        out_size=file.integer("out_features", most=MAX_SIZE),
        has_bias=file.flag("bias", True),
        activation=_ACTIVATIONS[
            file.choice("activation_function", _ACTIVATIONS, next(iter(_ACTIVATIONS)))
        ],
    )
    check_all_read(file, "Dense")
    return dense
