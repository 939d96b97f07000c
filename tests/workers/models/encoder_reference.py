"""Small random encoders made by Transformers, and both ways of running them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import (
    AutoModel,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    PreTrainedModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

from attention.abstract import AttentionBatch, EncoderBatch
from attention.cpu.torch_sdpa import TorchSDPABackend
from pagedray.config import EngineConfig
from pagedray.model_config import Dtype
from tests.workers.models.bart import Bart, bart_spec, read_bart_config
from workers.embedding_worker import text_positions
from workers.models.bert import Bert, encoder_spec
from workers.models.families.registry import read_model_config
from workers.parallel.group import ParallelGroup
from workers.weights.checkpoint import Checkpoint
from workers.weights.load_weights import fill_shards, load_weights

CPU = torch.device("cpu")
IDENTITY = "torch.nn.modules.linear.Identity"
BLOCK_SIZE = 4
VOCAB_SIZE = 131
TEXTS = [
    torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))
    for seed, length in enumerate((7, 1, 23, 12, 7))
]


def save_bert(folder: Path, *, is_cross_encoder: bool = False) -> None:
    """Save a random BERT."""
    config = BertConfig(
        id2label={0: "relevance"},
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=84,
        num_hidden_layers=3,
        num_attention_heads=6,
        max_position_embeddings=40,
        type_vocab_size=2,
    )
    _save((BertForSequenceClassification if is_cross_encoder else BertModel)(config), folder)


def save_xlm_roberta(folder: Path, *, is_cross_encoder: bool = False) -> None:
    """Save a random XLM-RoBERTa, whose padding token is in a text."""
    config = XLMRobertaConfig(
        id2label={0: "relevance"},
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=84,
        num_hidden_layers=3,
        num_attention_heads=6,
        max_position_embeddings=60,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        pad_token_id=int(TEXTS[2].min()),
    )
    kind = XLMRobertaForSequenceClassification if is_cross_encoder else XLMRobertaModel
    _save(kind(config), folder)


def save_bart(folder: Path, *, has_scaled_embedding: bool) -> None:
    """Save a random BART."""
    config = BartConfig(
        vocab_size=VOCAB_SIZE,
        d_model=48,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=84,
        decoder_ffn_dim=60,
        max_position_embeddings=40,
        scale_embedding=has_scaled_embedding,
        forced_eos_token_id=None,
    )
    _save(BartForConditionalGeneration(config), folder)


def bert_reference(folder: Path) -> list[torch.Tensor]:
    """Return what Transformers computes for each text alone, `[num_tokens, hidden_size]`."""
    model = AutoModel.from_pretrained(folder, attn_implementation="eager")
    with torch.inference_mode():
        return [model(text[None]).last_hidden_state[0] for text in TEXTS]


def bart_reference(folder: Path, num_tokens: int) -> list[list[int]]:
    """Return the greedy tokens of each text alone, without the start token of the decoder."""
    # Any: the library's types are inconsistent here.
    model: Any = BartForConditionalGeneration.from_pretrained(folder, attn_implementation="eager")
    outputs = []
    with torch.inference_mode():
        for text in TEXTS:
            ids = model.generate(
                text[None],
                attention_mask=torch.ones_like(text)[None],
                num_beams=1,
                do_sample=False,
                max_new_tokens=num_tokens,
            )
            outputs.append(ids[0, 1:].tolist())
    return outputs


def loaded_bert(folder: Path, group: ParallelGroup, dtype: Dtype = "float32") -> Bert:
    """Return this rank's part of a checkpoint, ready to run."""
    config = read_model_config(folder, dtype=dtype)
    model = Bert(config, group, backend=TorchSDPABackend, device=CPU)
    load_weights(model, EngineConfig(model=config))
    return model


def loaded_bart(folder: Path, group: ParallelGroup) -> Bart:
    """Return this rank's part of a checkpoint, ready to run."""
    model = Bart(read_bart_config(folder), group, backend=TorchSDPABackend, device=CPU)
    shards = list(model.weight_shards())
    with torch.inference_mode(), Checkpoint(folder) as checkpoint:
        checkpoint.check_tensors(shards, has_spare_head=True)
        fill_shards(shards, checkpoint)
        model.finalize()
    return model


@torch.inference_mode()
def run_bert(model: Bert, group: ParallelGroup) -> list[torch.Tensor]:
    """Return the hidden states of all texts, which run in one step with some padding."""
    num_padding = 3
    lengths = np.array([len(text) for text in TEXTS], dtype=np.int32)
    spec = encoder_spec(model.config, group, block_size=BLOCK_SIZE, device=CPU)
    batch = AttentionBatch(
        num_prefills=len(TEXTS),
        query_lens=lengths,
        seq_lens=lengths,
        block_tables=np.zeros((len(TEXTS), 1), dtype=np.int32),
        slot_mapping=np.full(int(lengths.sum()) + num_padding, -1, dtype=np.int64),
    )
    metadata = TorchSDPABackend.make_metadata_builder(spec).build(batch)
    padding = torch.zeros(num_padding, dtype=torch.int64)
    numbered = text_positions(
        torch.cat(TEXTS).numpy(), lengths, padding_id=model.config.position_padding_id
    )
    positions = torch.cat([torch.from_numpy(numbered), padding])
    hidden = model.encode_texts(torch.cat([*TEXTS, padding]), positions, metadata)
    return list(hidden.split([*lengths.tolist(), num_padding])[:-1])


class BartRun:
    """Runs texts through a cache until each has ended: their encoders first, then decodes."""

    def __init__(self, model: Bart, group: ParallelGroup) -> None:
        self._model = model
        spec = bart_spec(model.config, group, block_size=BLOCK_SIZE, device=CPU)
        self._builder = TorchSDPABackend.make_metadata_builder(spec)
        self._cache = torch.full(
            TorchSDPABackend.get_kv_cache_shape(
                num_blocks=100,
                num_layers=spec.block_shape[0],
                block_size=BLOCK_SIZE,
                num_kv_heads=spec.layers[0].num_kv_heads,
                head_size=model.config.head_size,
            ),
            float("nan"),
        )
        # Blocks in no order; each text has one table for its own tokens and one for its encoder.
        order = torch.randperm(100, generator=torch.Generator().manual_seed(0)).numpy()
        self._tables = order.astype(np.int32).reshape(2, -1, 10)

    @torch.inference_mode()
    def greedy(self, num_tokens: int) -> list[list[int]]:
        """Return up to `num_tokens` tokens of each text; texts start one by one."""
        model = self._model
        outputs: list[list[int]] = [[] for _ in TEXTS]
        for step in range(num_tokens + len(TEXTS) - 1):
            starting = [i for i in (step,) if i < len(TEXTS)]
            running = [
                i
                for i in range(min(step, len(TEXTS)))
                if not self._has_ended(outputs[i], num_tokens)
            ]
            rows = [*starting, *running]
            if not rows:
                break
            metadata = self._builder.build(self._batch(rows, len(starting), outputs))
            encoded = None
            if starting:
                text = TEXTS[starting[0]]
                encoded = model.encode(text, torch.arange(len(text)), self._cache, metadata)
            first = model.config.first_token_id
            ids = torch.tensor([(outputs[i] or [first])[-1] for i in rows])
            positions = torch.tensor([len(outputs[i]) for i in rows])
            hidden = model.forward(ids, positions, encoded, self._cache, metadata)
            for i, token in zip(rows, model.logits(hidden).argmax(1).tolist(), strict=True):
                outputs[i].append(token)
        return outputs

    def _has_ended(self, tokens: Sequence[int], num_tokens: int) -> bool:
        return len(tokens) == num_tokens or tokens[-1] in self._model.config.eos_token_ids

    def _batch(
        self, rows: Sequence[int], num_starting: int, outputs: Sequence[Sequence[int]]
    ) -> AttentionBatch:
        positions = np.array([len(outputs[i]) for i in rows])
        lengths = np.array([len(TEXTS[i]) for i in rows], dtype=np.int32)
        own, of_encoder = self._tables[0, rows], self._tables[1, rows]
        encoder_positions = np.arange(int(lengths[:num_starting].sum()))
        return AttentionBatch(
            num_prefills=num_starting,
            query_lens=np.ones(len(rows), dtype=np.int32),
            seq_lens=(positions + 1).astype(np.int32),
            block_tables=own,
            slot_mapping=_slots(own[np.arange(len(rows)), positions // BLOCK_SIZE], positions),
            encoder=EncoderBatch(
                query_lens=np.where(np.arange(len(rows)) < num_starting, lengths, 0).astype(
                    np.int32
                ),
                seq_lens=lengths,
                block_tables=of_encoder,
                slot_mapping=_slots(
                    of_encoder[0, encoder_positions // BLOCK_SIZE], encoder_positions
                ),
            ),
        )


def _slots(
    blocks: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    slots: npt.NDArray[np.int64] = blocks.astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    return slots


def _save(model: PreTrainedModel, folder: Path) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        # Transformers starts norms at one and biases at zero, which would hide a mistake. Norms
        # flip signs and attention adds little, or else a tied decoder would repeat itself.
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
            elif parameter.dim() == 1 and parameter.is_floating_point():
                parameter.normal_()
                parameter.copy_(parameter.sign() * (0.8 + 0.2 * parameter))
            elif parameter.is_floating_point():
                deviation = 0.3 if "out_proj" in name or "output.dense" in name else 2.0
                parameter.normal_(0.0, deviation * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)


def save_embedding_gemma(folder: Path, *, window: int) -> None:
    """Save a small EmbeddingGemma with two linear layers after the mean of its tokens."""
    torch.manual_seed(5)
    config = Gemma3TextConfig(
        vocab_size=131,
        hidden_size=48,
        intermediate_size=84,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        sliding_window=window,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=8,
        use_bidirectional_attention=True,
        initializer_range=0.4,
        pad_token_id=0,
    )
    Gemma3TextModel(config).save_pretrained(folder)
    modules = ("Transformer", "Pooling", "Dense", "Dense", "Normalize")
    listed = [
        {"idx": index, "path": f"{index}_{one}", "type": f"sentence_transformers.models.{one}"}
        for index, one in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    save_dense(folder / "2_Dense", (48, 80), bias=False, activation_function=IDENTITY)
    save_dense(folder / "3_Dense", (80, 20), bias=True)


def save_dense(folder: Path, sizes: tuple[int, int], **settings: Any) -> None:
    in_size, out_size = sizes
    folder.mkdir()
    settings |= {"in_features": in_size, "out_features": out_size}
    (folder / "config.json").write_text(json.dumps(settings))
    linear = torch.nn.Linear(in_size, out_size, bias=settings["bias"])
    tensors = {f"linear.{name}": tensor for name, tensor in linear.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")


def with_dense(folder: Path, pooled: torch.Tensor) -> torch.Tensor:
    """Return what plain torch makes of pooled vectors."""
    first, second = (load_file(folder / f"{name}_Dense" / "model.safetensors") for name in (2, 3))
    hidden = functional.linear(pooled, first["linear.weight"])
    return functional.linear(hidden, second["linear.weight"], second["linear.bias"]).tanh()
