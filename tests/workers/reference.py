"""Small random checkpoints made by Transformers, and both ways of running them."""

import math
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from attention.abstract import AttentionBatch, AttentionSpec
from attention.cpu.torch_sdpa import TorchSDPABackend
from attention.kernels.arguments import Segments
from attention.params import storage_dtype
from pagedray.config import EngineConfig
from pagedray.model_config import Dtype
from tests.small_models.multimodal import TEXT_TYPES, multimodal_config, transformers_class
from tests.workers.reference_cases import CASES
from workers.layers.recurrent import StepStates
from workers.models.decoder import Decoder
from workers.models.families.registry import read_model_config
from workers.models.self_attention import CachedAttention, attention_spec
from workers.parallel.group import ParallelGroup
from workers.weights.load_weights import load_weights

CPU = torch.device("cpu")
NUM_TOKENS = 23
BLOCK_SIZE = 4


def save_checkpoint(name: str, folder: Path, **saving: Any) -> None:
    """Save the random model of a case."""
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, content in _checkpoint_files(name, **saving).items():
        (folder / file_name).write_bytes(content)
    torch.manual_seed(len(name))


@cache
def _checkpoint_files(name: str, **saving: Any) -> dict[str, bytes]:
    """Return the files of a case by name; a process makes them once, since many tests need them."""
    with tempfile.TemporaryDirectory() as folder:
        _make_model(name).save_pretrained(folder, **saving)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _make_model(name: str) -> Any:  # Any: transformers has no types
    case = dict(CASES[name])
    heads, kv_heads = case.pop("heads"), case.pop("kv_heads")
    model_type = case.pop("model_type")
    # Families with ALiBi have none of these.
    if model_type not in ("bloom", "mpt"):
        case.setdefault("intermediate_size", 84)
        case["num_key_value_heads"] = kv_heads
        case["max_position_embeddings"] = 64
    case |= {
        "vocab_size": 131,
        "hidden_size": heads * 8,
        "num_hidden_layers": case.get("num_hidden_layers", 3),
        "num_attention_heads": heads,
        # The defaults of some families exceed this small vocabulary.
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if model_type in TEXT_TYPES:
        is_tied = case.pop("tie_word_embeddings", False)
        text = case | {"model_type": case.pop("text_type")}
        config = multimodal_config(model_type, text, is_tied=is_tied)
        auto_class: Any = AutoModelForImageTextToText
    else:
        config, auto_class = AutoConfig.for_model(model_type, **case), AutoModelForCausalLM
    torch.manual_seed(len(name))
    model = auto_class.from_config(config)
    with torch.no_grad():
        # Transformers starts norms at one and biases at zero, which would hide a mistake.
        for parameter in model.parameters():
            is_matrix = parameter.dim() > 1
            deviation = 1.5 / math.sqrt(parameter.shape[-1]) if is_matrix else 0.3
            parameter.normal_(0.0 if is_matrix else 0.7, deviation)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.normal_(0.9, 0.2)
            elif name.endswith(("expert_bias", "correction_bias")):
                buffer.normal_(0.0, 0.3)
    return model


def token_ids() -> torch.Tensor:
    """Return the tokens that every case is run with."""
    return torch.randint(0, 131, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))


def reference_logits(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return what Transformers computes, `[num_tokens, vocab_size]`."""
    model = transformers_class(folder).from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="eager",
        # The default needs rows of a multiple of 16 bytes.
        experts_implementation="eager",
    )
    with torch.inference_mode():
        logits: torch.Tensor = model(token_ids()[None], use_cache=False).logits[0]
    return logits.float()


def loaded_model(
    folder: Path,
    group: ParallelGroup,
    dtype: Dtype = "float32",
    *,
    is_expert_parallel: bool = False,
    fuses: bool | None = None,
) -> Decoder:
    """Return this rank's part of a checkpoint, ready to run."""
    config = read_model_config(folder, dtype=dtype)
    if is_expert_parallel:
        config = config.with_expert_parallel()
    model = Decoder(config, group, backend=TorchSDPABackend, device=CPU, fuses=fuses)
    load_weights(model, EngineConfig(model=config))
    return model


class RowStates:
    """The states of the sequence in one row; the states of other rows are NaN."""

    def __init__(self, spec: AttentionSpec) -> None:
        num_bytes = spec.state_blocks * spec.block_bytes
        states = torch.full((3, num_bytes), 0xFF, dtype=torch.uint8)
        states[1] = 0
        self._layers = spec.state_views(states)

    def of_step(self, num_tokens: int) -> StepStates | None:
        """Return the states of a step of these tokens, or None if the model has no states."""
        if not self._layers:
            return None
        starts, rows = torch.tensor([0, num_tokens]).int(), torch.tensor([1]).int()
        segments = Segments(query_starts=starts, rows=rows, max_query_len=num_tokens)
        return StepStates(segments, self._layers)


@torch.inference_mode()
def run(
    model: Decoder,
    group: ParallelGroup,
    steps: tuple[int, ...] = (NUM_TOKENS,),
    logits_indices: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the logits of the last step, after steps of these numbers of tokens.

    The tokens are `ids`, `[num_tokens]` int64, or else `token_ids`.
    """
    ids = token_ids() if ids is None else ids
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    spec = attention_spec(model.config, group, block_size=BLOCK_SIZE, device=CPU).grouped()
    builder = TorchSDPABackend.make_metadata_builder(spec)
    num_groups = len(spec.group_windows)
    shape = num_groups * (num_blocks + 1), *spec.block_shape
    cache = torch.zeros(shape, dtype=storage_dtype(spec.cache_dtype))
    order = np.random.default_rng(num_blocks).permutation(num_blocks + 1)
    table, first = order[None, :num_blocks].astype(np.int32), 0
    states = RowStates(spec)
    for size in steps:
        positions = np.arange(first, first + size)
        batches = [
            AttentionBatch(
                num_prefills=int(size > 1),
                query_lens=np.array([size], dtype=np.int32),
                seq_lens=np.array([first + size], dtype=np.int32),
                block_tables=blocks,
                slot_mapping=blocks[0][positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
                + positions % BLOCK_SIZE,
            )
            for blocks in (table + (num_blocks + 1) * index for index in range(num_groups))
        ]
        batch = replace(batches[0], other_groups=tuple(batches[1:]))
        hidden = model.forward(
            ids[first : first + size],
            torch.from_numpy(positions),
            CachedAttention(cache, builder.build(batch), states.of_step(size)),
            logits_indices,
        )
        first += size
    return model.logits(hidden).whole()
