"""A checkpoint's JSON file; each invalid value raises a CheckpointError that names it."""

from __future__ import annotations

import json
import math
from types import MappingProxyType
from typing import TYPE_CHECKING

from pagedray.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

__all__ = ["IGNORED_FIELDS", "MISSING", "ConfigFile", "check_all_read", "reason_to_ignore"]

_MAX_BYTES = 4 * 2**20
_MAX_KEY = 100
"""Characters of a key in a message."""
_ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta")
_NO_DEFAULTS: Mapping[str, object] = MappingProxyType({})

_TRAINING = "training only"
_GENERATION = "a default for text generation, which requests set themselves"
_OUTPUT = "selects what transformers returns besides logits"
_TASK = "a task other than text"
_SPECIAL = "a token id that text generation does not need"
_SPEED = "affects how the model is computed, not the result"
_RECORD = "a record of how the checkpoint was made"
_BY_REASON = {
    _TRAINING: (
        *("initializer_range", "init_config", "init_device", "gradient_checkpointing", "verbose"),
        *("initializer_factor", "init_std", "layerdrop", "router_aux_loss_coef", "z_loss_weight"),
        *("moe_z_loss", "use_cut_cross_entropy", "loss_type", "label_smoothing"),
        *("router_jitter_noise",),
    ),
    _GENERATION: (
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "temperature"),
        *("top_k", "top_p", "typical_p", "min_p", "repetition_penalty", "length_penalty"),
        *("num_beam_groups", "diversity_penalty", "no_repeat_ngram_size", "bad_words_ids"),
        *("encoder_no_repeat_ngram_size", "num_return_sequences", "output_scores"),
        *("return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id"),
        *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
        *("begin_suppress_tokens", "cache_implementation", "max_new_tokens", "use_cache"),
        *("epsilon_cutoff", "eta_cutoff", "encoder_repetition_penalty", "use_mtp"),
        *("assistant_confidence_threshold", "assistant_lookbehind", "num_assistant_tokens"),
        *("num_assistant_tokens_schedule", "target_lookbehind"),
    ),
    _OUTPUT: (
        *("output_hidden_states", "output_attentions", "return_dict", "torchscript"),
        *("tie_last_hidden_states", "chunk_size_feed_forward", "output_past"),
        *("output_router_logits",),
    ),
    _TASK: (
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task"),
        *("task_specific_params", "classifier_dropout", "summary_type", "tie_encoder_decoder"),
        *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_type"),
        *("pooler_num_fc_layers", "pooler_size_per_head", "matryoshka_dimensions"),
    ),
    _SPECIAL: (
        *("bos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id"),
        *("unk_token_id", "decoder_start_token_id"),
    ),
    _SPEED: (
        *("pretraining_tp", "slow_but_exact", "use_bfloat16", "attn_implementation"),
        *("experts_implementation", "attn_impl", "fused_qkv", "masked_softmax_fusion"),
        *("bias_dropout_fusion", "skip_bias_add", "skip_bias_add_qkv", "use_flash_attn"),
        *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "fc_type"),
        *("use_parallel_embedding", "transformers.js_config", "layer_switch", "world_size"),
        *("use_flash_attention", "offset_alibi", "scale_attn_weights"),
    ),
    _RECORD: (
        *("transformers_version", "name_or_path", "model_name", "tokenizer_class", "prefix"),
        *("unsloth_version", "unsloth_fixed", "is_llama_config", "max_sequence_length"),
        *("model_max_length", "training_args", "language", "tokenizer_name", "model_version"),
        *("version", "export_model_type"),
    ),
}
IGNORED_FIELDS: Mapping[str, str] = MappingProxyType(
    {field: reason for reason, fields in _BY_REASON.items() for field in fields}
)
"""The reason to ignore each field, at the top level or in a section."""
_OF_WINDOWS = ("sliding_window", "max_window_layers")
_DROPOUT_SUFFIXES = ("dropout", "dropout_prob", "pdrop", "drop_prob")


class _Missing:
    """The default of a key that is required."""


MISSING = _Missing()


class ConfigFile:
    """The values of one JSON object and the path of its file. Methods raise CheckpointError."""

    def __init__(self, path: Path, values: Mapping[str, object], *, prefix: str = "") -> None:
        self._path = path
        self._values = values
        self._prefix = prefix
        self._read_keys: set[str] = set()
        self._sections: dict[str, ConfigFile] = {}

    @classmethod
    def read(cls, path: Path) -> ConfigFile:
        """Read the JSON object in a file."""
        values = cls._parsed(path)
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} must contain a JSON object, not {_shown(values)}.")
        return cls(path, values)

    def with_overrides(self, overrides: Mapping[str, object]) -> ConfigFile:
        """Return the file with other values, as `hf_overrides` of vLLM gives them."""
        if overrides.get("rope_parameters") and overrides.get("rope_scaling"):
            raise self.rejection("rope_scaling", "cannot be overridden with rope_parameters")
        return ConfigFile(self._path, _overridden(self._values, overrides), prefix=self._prefix)

    @classmethod
    def read_list(cls, path: Path) -> tuple[ConfigFile, ...]:
        """Read the list of JSON objects in a file."""
        values = cls._parsed(path)
        if not isinstance(values, list) or not all(isinstance(one, dict) for one in values):
            raise CheckpointError(
                f"{path} must contain a list of JSON objects, not {_shown(values)}."
            )
        return tuple(cls(path, one, prefix=f"{index}.") for index, one in enumerate(values))

    @staticmethod
    def _parsed(path: Path) -> object:
        try:
            if path.stat().st_size > _MAX_BYTES:
                raise CheckpointError(
                    f"{path} has {path.stat().st_size} bytes; at most {_MAX_BYTES} are allowed."
                )
            values: object = json.loads(path.read_bytes())
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
        except (ValueError, RecursionError) as error:
            first_line = str(error).partition("\n")[0]
            raise CheckpointError(f"{path} is not valid JSON: {first_line}.") from None
        return values

    def __contains__(self, key: str) -> bool:
        self.note_read(key)
        return self._values.get(key) is not None

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self._path

    def rejection(self, key: str, problem: str) -> CheckpointError:
        """Return an error that names the file, the key and the problem."""
        # A key that is not known may be any text; an error is one line.
        is_plain = key.isprintable() and len(key) <= _MAX_KEY
        shown = key if is_plain else f"{key!r:.{_MAX_KEY}}"
        return CheckpointError(f"{self._path}: {self._prefix}{shown} {problem}.")

    def given_keys(self) -> tuple[str, ...]:
        """Return all keys, including keys with a null value."""
        return tuple(self._values)

    def keys_of_objects(self) -> tuple[str, ...]:
        """Return the keys that hold an object."""
        return tuple(key for key, value in self._values.items() if isinstance(value, dict))

    def note_read(self, *keys: str) -> None:
        """Note that keys were considered, though perhaps without an effect."""
        self._read_keys.update(keys)

    def note_copies(self, section: ConfigFile) -> None:
        """Note the keys that a section has too, with the same values."""
        self.note_read(
            *(
                key
                for key, value in self._values.items()
                if key in section._values and section._values[key] == value
            )
        )

    def read_keys(self) -> frozenset[str]:
        """Return the keys that any method was asked for."""
        return frozenset(self._read_keys)

    def unread(self) -> Iterator[tuple[ConfigFile, str]]:
        """Yield each key that no method was asked for, with its section."""
        for key in self._values:
            if key not in self._read_keys:
                yield self, key
        for section in self._sections.values():
            yield from section.unread()

    def value(self, key: str) -> object:
        """Return a value unchecked, or None if the key is missing."""
        self.note_read(key)
        return self._values.get(key)

    def has_null(self, key: str) -> bool:
        """Return whether the key is there and its value is null."""
        self.note_read(key)
        return key in self._values and self._values[key] is None

    def first_of(self, *keys: str) -> str:
        """Return the first key that has a value, or the last key if none has."""
        self.note_read(*keys)
        return next((key for key in keys if key in self), keys[-1])

    def integer(
        self, key: str, default: int | _Missing = MISSING, *, least: int = 1, most: int
    ) -> int:
        """Return an integer from `least` to `most`."""
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.rejection(
                key, f"must be an integer from {least} to {most}, not {_shown(value)}"
            )
        return value

    def number(
        self,
        key: str,
        default: float | _Missing = MISSING,
        *,
        least: float = 0.0,
        most: float = math.inf,
    ) -> float:
        """Return a finite number above `least` and at most `most`."""
        value = self._given(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not (least < value <= most and math.isfinite(value))
        ):
            raise self.rejection(
                key, f"must be a number above {least:g} and at most {most:g}, not {_shown(value)}"
            )
        return float(value)

    def number_or_null(self, key: str, default: float | None, *, most: float) -> float | None:
        """Return a number above 0, or None for null; the default is that of a missing key."""
        if self.has_null(key) or (default is None and key not in self):
            return None
        return self.number(key, MISSING if default is None else default, most=most)

    def numbers(
        self, key: str, length: int, *, least: float = 0.0, most: float
    ) -> tuple[float, ...]:
        """Return a list of `length` numbers, each above `least` and at most `most`."""
        values = self._given(key, MISSING)
        if not isinstance(values, list) or len(values) != length:
            raise self.rejection(key, f"must be a list of {length} numbers, not {_shown(values)}")
        items = ConfigFile(
            self._path,
            {str(index): value for index, value in enumerate(values)},
            prefix=f"{self._prefix}{key}.",
        )
        return tuple(items.number(str(index), least=least, most=most) for index in range(length))

    def reject_unless(self, key: str, allowed: object) -> None:
        """Raise CheckpointError for any value but the supported value."""
        value = self._given(key, allowed)
        if value != allowed:
            raise self.rejection(key, f"must be {_shown(allowed)}, not {_shown(value)}")

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._given(key, default)
        if not isinstance(value, bool):
            raise self.rejection(key, f"must be true or false, not {_shown(value)}")
        return value

    def choice(self, key: str, allowed: Iterable[str], default: str | _Missing = MISSING) -> str:
        """Return one of the allowed strings."""
        value = self._given(key, default)
        words = list(allowed)
        if not isinstance(value, str) or value not in words:
            raise self.rejection(key, f"must be one of {', '.join(words)}, not {_shown(value)}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return the ids of a key that holds one id, a list of ids, or nothing."""
        value = self.value(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise self.rejection(
                    key, f"must contain only non-negative token ids, not {_shown(token_id)}"
                )
        return tuple(ids)

    def indices(self, key: str, *, most: int) -> tuple[int, ...]:
        """Return a list of integers from 0 to `most`; empty if there is none."""
        values = self.value(key)
        if values is None:
            return ()
        if not isinstance(values, list) or not all(
            isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
            for value in values
        ):
            raise self.rejection(
                key, f"must be a list of integers from 0 to {most}, not {_shown(values)}"
            )
        return tuple(values)

    def word(self, key: str) -> str:
        """Return a string."""
        value = self._given(key, MISSING)
        if not isinstance(value, str):
            raise self.rejection(key, f"must be a string, not {_shown(value)}")
        return value

    def words(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; empty if there is none."""
        value = self.value(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.rejection(key, f"must be a list of strings, not {_shown(value)}")
        return tuple(value)

    def section(self, key: str, defaults: Mapping[str, object] = _NO_DEFAULTS) -> ConfigFile:
        """Return the object under a key; empty if there is none, but for the defaults."""
        value = self.value(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.rejection(key, f"must be an object, not {_shown(value)}")
        if key not in self._sections:
            self._sections[key] = ConfigFile(
                self._path, {**defaults, **value}, prefix=f"{self._prefix}{key}."
            )
        return self._sections[key]

    def _given(self, key: str, default: object) -> object:
        value = self.value(key)
        if value is not None:
            return value
        if default is MISSING:
            raise self.rejection(key, "is missing")
        return default


def _overridden(
    values: Mapping[str, object], overrides: Mapping[str, object]
) -> Mapping[str, object]:
    """Return values in which overrides win; rope has the keys of transformers 4 and of 5."""
    text, given_text = values.get("text_config"), overrides.get("text_config", {})
    if isinstance(text, dict) and isinstance(given_text, dict):
        # Rope is a field of the text model, for which vLLM's flags are meant.
        moved = {key for key in _ROPE_FIELDS if key in overrides and key not in values}
        given_text = {**{key: overrides[key] for key in moved}, **given_text}
        overrides = {key: value for key, value in overrides.items() if key not in moved}
        overrides["text_config"] = _overridden(text, given_text)
    merged = {**values, **overrides}
    rope = values.get("rope_parameters")
    if "rope_parameters" in overrides or (rope and "rope_scaling" in overrides):
        given = overrides.get("rope_parameters", overrides.get("rope_scaling")) or {}
        if isinstance(given, dict):
            # The file may have no other place for these.
            old = rope if isinstance(rope, dict) else {}
            kept = {key: old[key] for key in ("rope_theta", "partial_rotary_factor") if key in old}
            merged |= {"rope_parameters": {**kept, **given}, "rope_scaling": None}
    for key in ("rope_parameters", "rope_scaling"):
        section = merged.get(key)
        if "rope_theta" in overrides and isinstance(section, dict) and section:
            merged[key] = {**section, "rope_theta": overrides["rope_theta"]}
    return merged


def _shown(value: object) -> str:
    # Python refuses to print integers of thousands of digits.
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**40:
        return f"an integer of {value.bit_length()} bits"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def reason_to_ignore(field: str) -> str | None:
    """Return why a field changes no output, or None if it may change it."""
    if field.startswith("_"):
        return "private to the library that wrote it"
    if field.endswith(_DROPOUT_SUFFIXES):
        return _TRAINING
    return IGNORED_FIELDS.get(field)


def check_all_read(file: ConfigFile, architecture: str) -> None:
    """Raise CheckpointError for a field that was not read and may change the result."""
    for section, key in file.unread():
        if key in _OF_WINDOWS and section.value("use_sliding_window") is False:
            continue
        # By convention, null, false, 0 and empty values leave an option off.
        if section.value(key) and reason_to_ignore(key) is None:
            raise section.rejection(
                key,
                f"is not a field of {architecture} that is supported; remove it if it has no "
                "effect",
            )
