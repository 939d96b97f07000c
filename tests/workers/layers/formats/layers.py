"""Linear layers of one format, loaded from a folder, on a rank that never communicates."""

import re
from pathlib import Path
from typing import TypeVar

import torch

from pagedray.weight_format import FormatRule, Quantization, WeightFormat
from workers.layers.linear import ColumnParallelLinear, Columns, RowParallelLinear
from workers.layers.weight import Placement
from workers.parallel.group import SoloGroup
from workers.weights.checkpoint import Checkpoint
from workers.weights.load_weights import FiniteTensors, fill_shards

Layer = TypeVar("Layer", ColumnParallelLinear, RowParallelLinear)


CPU = torch.device("cpu")


def column_layer(
    sizes: dict[str, int],
    in_size: int,
    format: WeightFormat,
    group: SoloGroup | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> ColumnParallelLinear:
    """Return layers of these names and numbers of columns in one product."""
    group = group or SoloGroup()
    columns = []
    for name, size in sizes.items():
        part = slice(size * group.rank // group.size, size * (group.rank + 1) // group.size)
        columns.append(Columns(name=name, total=size, part=part))
    place = Placement(group, dtype, CPU, _all(format))
    return ColumnParallelLinear(in_size, columns, place, has_bias=False)


def row_layer(
    name: str, out_size: int, in_size: int, format: WeightFormat, group: SoloGroup
) -> RowParallelLinear:
    """Return a layer whose outputs are this rank's part of the sum."""
    place = Placement(group, torch.float32, CPU, _all(format))
    return RowParallelLinear(name, in_size, out_size, place, has_bias=False)


def loaded(layer: Layer, folder: Path, *, num_threads: int = 1) -> Layer:
    """Return the layer, loaded from the checkpoint in a folder as a model is."""
    shards = list(layer.weight_shards())
    with torch.inference_mode(), Checkpoint(folder) as checkpoint:
        checkpoint.check_tensors(shards, has_spare_head=False)
        tensors = FiniteTensors(checkpoint)
        fill_shards(checkpoint.in_file_order(shards), tensors, num_threads=num_threads)
        tensors.raise_if_not_finite()
        layer.finalize()
    return layer


def _all(format: WeightFormat) -> Quantization:
    return Quantization(method="test", rules=(FormatRule(re.compile(""), format),))
