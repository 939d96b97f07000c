"""Small models of sentencepiece, and one of them saved as tokenizer.json."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, processors

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["train_sentencepiece", "write_sentencepiece"]

_SENTENCES = ("def f(x):\n    return x + 1\n", "import numpy as np\n", "class A:\n    pass\n")


def train_sentencepiece(marks: tuple[str, ...] = ()) -> bytes:
    """Return a small model, with the marks as control tokens."""
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((*_SENTENCES * 20, "\u263a")),
        model_writer=content,
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=1.0,
        add_dummy_prefix=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_by_whitespace=True,
        hard_vocab_limit=False,
        control_symbols=list(marks),
        minloglevel=2,
    )
    return content.getvalue()


def write_sentencepiece(
    folder: Path, marks: tuple[str, ...]
) -> sentencepiece.SentencePieceProcessor:
    """Save a small model with the marks as control tokens, and return the library's own."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=train_sentencepiece(marks))
    pieces = {processor.id_to_piece(index): index for index in range(processor.get_piece_size())}
    # A pair is merged if its piece has the best score, and the leftmost of equal ones.
    merges = sorted(
        (-processor.get_score(index), -split, piece[:split], piece[split:])
        for piece, index in pieces.items()
        for split in range(1, len(piece))
        if piece[:split] in pieces and piece[split:] in pieces
    )
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab=pieces,
            merges=[(left, right) for _, _, left, right in merges],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    bos_id = processor.bos_id()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos_id)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", *marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}'
    )
    return processor
