"""The rotary embeddings of the layers of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.layers.rope import NoRotation, RotaryEmbedding

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pagedray.model_config import ModelConfig
    from workers.layers.rope import Rotation

__all__ = ["LayerRotations"]


class LayerRotations:
    """Each rotary embedding of a model, made once and shared by the layers that use it.

    Models with ALiBi have none: their attention adds a bias by distance.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_query_heads: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        of_layers = [config.rope_of(layer) for layer in range(config.num_layers)]
        ropes = list(dict.fromkeys(of_layers))
        self._indices = [ropes.index(rope) for rope in of_layers]
        self._embeddings = [
            RotaryEmbedding(
                rope,
                head_size=config.head_size,
                num_query_heads=num_query_heads,
                max_positions=config.max_positions,
                dtype=dtype,
                device=device,
            )
            if rope is not None
            else None
            for rope in ropes
        ]

    def rotations(self, positions: torch.Tensor) -> Iterator[Rotation]:
        """Yield each layer's rotation to these positions, `[num_tokens]` int64."""
        rotations = [
            NoRotation() if embedding is None else embedding.rotation_at(positions)
            for embedding in self._embeddings
        ]
        for index in self._indices:
            yield rotations[index]
