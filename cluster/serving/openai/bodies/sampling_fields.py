"""The parameters that all of OpenAI's endpoints which generate text have in common."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, JsonValue

from cluster.serving.inputs import MAX_SALT_LENGTH
from cluster.serving.json_body import Body, BodyPart, described, json_text, named_schema, read_part
from cluster.structured.grammar.grammar_text import MAX_TEXT_BYTES
from pagedray.errors import invalid_field
from pagedray.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_STOP,
    MAX_STOP_LENGTH,
    Structure,
    StructureKind,
)
from pagedray.text import quote, quote_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.serving.json_body import Defaults

__all__ = [
    "CHAT_REJECTED",
    "CHAT_WITHOUT_EFFECT",
    "IGNORED",
    "IN_IGNORED",
    "MODERATION",
    "REJECTED",
    "UNLIMITED",
    "WITHOUT_EFFECT",
    "RequestedStructure",
    "SamplingFields",
    "bounds",
    "cache_salt_field",
    "model_field",
    "prompts_field",
    "read_response_format",
    "template_variables_field",
    "thinking_budget",
    "thinking_budget_field",
]

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,19}")
_LAST_OF_LATIN_1 = "\u00ff"
_NAMES = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "ignore_eos",
    "disable_spec_decode",
)
_ONE_STOP: dict[str, JsonValue] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
_TAG_FIELDS = ("structures", "triggers", "format")

IGNORED: Mapping[str, str] = {
    "guided_decoding_backend": "xgrammar compiles every structure",
    "media_io_kwargs": "applies to images and audio, which are not supported",
    "metadata": "labels for OpenAI's dashboard",
    "mm_payload": "applies to images and audio, which are not supported",
    "mm_processor_kwargs": "applies to images and audio, which are not supported",
    "nvext": "hints for NVIDIA's router; fields that would change the output are rejected",
    "prediction": "a prediction of the output only affects speed",
    "prompt_cache_key": "prefixes are always cached for each tenant",
    "prompt_cache_options": "prefixes are always cached, as long as there is room",
    "prompt_cache_retention": "prefixes stay in the cache as long as there is room",
    "return_mm_kwargs": "applies to images and audio, which are not supported",
    "return_token_offsets": "applies to endpoints of vLLM that only render prompts",
    "safety_identifier": "an identifier of the end user",
    "service_tier": "there is only one service tier",
    "session_id": "only affects to which replica of Ray Serve a request is routed",
    "store": "completions are not stored",
    "stream_interval": "a stream has the tokens of each step as soon as they are generated",
    "user": "an identifier of the end user",
    "verbosity": "only applies to models of OpenAI",
    "vllm_xargs": "arguments for plugins of vLLM",
}
"""Parameters that cannot change a token, and why they have no effect."""
IN_IGNORED: Mapping[str, Mapping[str, str]] = {
    "nvext": {
        "cache_salt": "use cache_salt of the request",
        "greed_sampling": "use temperature = 0",
        "guided_choice": "use structured_outputs",
        "guided_grammar": "use structured_outputs",
        "guided_json": "use structured_outputs",
        "guided_regex": "use structured_outputs",
        "ignore_eos": "use ignore_eos of the request",
        "max_thinking_tokens": "use thinking_token_budget",
        "min_p": "use min_p of the request",
        "repetition_penalty": "use repetition_penalty of the request",
        "token_data": "use /v1/completions, whose prompt may be token ids",
        "top_k": "use top_k of the request",
        "use_raw_prompt": "use /v1/completions",
    },
    "vllm_xargs": {"disable_spec_decode": "use disable_spec_decode of the request"},
}
"""Fields of ignored parameters that would change the answer, each with an alternative."""
WITHOUT_EFFECT: Defaults = {
    "max_repetition_pattern_size": (0,),
    "min_repetition_pattern_size": (0,),
    "no_stop_trim": (False,),
    "repetition_min_count": (0,),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "return_weight_versions": (False,),
    "routed_experts_prompt_start": (0,),
    "routed_experts_start_len": (0,),
    "spaces_between_special_tokens": (True,),
    "watermarking": (False,),
}
"""Unsupported parameters and their values without effect, of completions and chat."""
CHAT_WITHOUT_EFFECT: Defaults = {
    "echo": (False,),
    "modalities": (["text"],),
    "return_prompt_text": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
}
REJECTED: Mapping[str, str] = {
    "custom_logit_processor": "code of clients is never run",
    "custom_params": "code of clients is never run",
    "ec_transfer_params": "images and audio are not supported",
    "extra_body": "the client library sends its entries as parameters of the request",
    "input_ids": "use /v1/completions, whose prompt may be token ids",
    "kv_transfer_params": "a replica computes the prompts of its own requests",
    "logits_processors": "code of clients is never run",
    "lora_path": "LoRA adapters are not supported",
    "max_repetition_pattern_size": "use repetition_penalty, or limit max_tokens",
    "min_repetition_pattern_size": "use repetition_penalty, or limit max_tokens",
    "no_stop_trim": "use include_stop_str_in_output",
    "prompt_embeds": "use text or token ids",
    "repetition_detection": "use repetition_penalty, or limit max_tokens",
    "repetition_min_count": "use repetition_penalty, or limit max_tokens",
    "return_cached_tokens_details": "usage counts the cached tokens of the prompt",
    "return_hidden_states": "the server does not return hidden states",
    "return_meta_info": "use usage, logprobs and return_token_ids",
    "return_prompt_token_ids": "use return_token_ids",
    "return_routed_experts": "the server does not return routed experts",
    "return_weight_versions": "the weights do not change while the server runs",
    "routed_experts_prompt_start": "the server does not return routed experts",
    "routed_experts_start_len": "the server does not return routed experts",
    "spaces_between_special_tokens": "the text is always as the tokenizer decodes it",
    "stop_regex": "use stop, or structured_outputs",
    "watermarking": "outputs have no watermark",
}
"""Parameters that would change the output, each with an alternative or the reason."""
MODERATION = "the server has no moderation model; send the texts to a moderation service"
CHAT_REJECTED: Mapping[str, str] = {
    "audio": "the output is text",
    "echo": "use continue_final_message, and prepend the message",
    "modalities": "the output is text",
    "moderation": MODERATION,
    "return_prompt_text": "use return_token_ids, and /detokenize",
    "separate_reasoning": "the reasoning is always separated from the content",
    "stream_reasoning": "a stream has the reasoning as it is generated",
    "web_search_options": "the server has no access to the web",
}
UNLIMITED = -1
"""The value of a limit that is the same as none."""


# Any: a pydantic field.
def bounds(description: str, low: float | None = None, high: float | None = None) -> Any:
    """Return an optional numeric field with documented bounds, which the validator checks."""
    limits = {"minimum": low, "maximum": high}
    known: dict[str, JsonValue] = {
        name: value for name, value in limits.items() if value is not None
    }
    return described(description, **known)


def cache_salt_field() -> Any:  # Any: a pydantic field
    """Return a field that restricts which requests share prefixes, by vLLM's name."""
    return described(
        "Prefixes are shared only by requests with the same salt.",
        minLength=1,
        maxLength=MAX_SALT_LENGTH,
    )


def thinking_budget_field() -> Any:  # Any: a pydantic field
    """Return a field that limits the model's reasoning, by vLLM's name."""
    return bounds(
        "Number of tokens after which the model's reasoning is ended; -1 does not limit it. "
        "Requires a model that reasons, other than gpt-oss.",
        UNLIMITED,
    )


def thinking_budget(given: int | None) -> int | None:
    """Return the limit that such a field sets; None is none."""
    return None if given == UNLIMITED else given


def template_variables_field() -> Any:  # Any: a pydantic field
    """Return a field with variables of the chat template, by vLLM's name."""
    return described(
        "Variables for the model's chat template, such as `enable_thinking`; those that it does "
        "not read are ignored.",
        type="object",
    )


def model_field() -> Any:  # Any: a pydantic field
    """Return a field with the name of the model, which clients may omit."""
    return described("The name of the model, which `/v1/models` lists; optional.")


def prompts_field(max_items: int, *, min_items: int | None = None) -> Any:  # Any: a pydantic field
    """Return a field that is a text or its token ids, or a list of either."""
    token_ids: dict[str, JsonValue] = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0},
        "minItems": 1,
    }
    limits: dict[str, JsonValue] = {} if min_items is None else {"minItems": min_items}
    limits["maxItems"] = max_items
    text: dict[str, JsonValue] = {"type": "string", "minLength": 1}
    kinds: list[JsonValue] = [
        text,
        {"type": "array", "items": text, **limits},
        token_ids,
        {"type": "array", "items": token_ids, **limits},
    ]
    return described("A string or an array of token ids, or an array of either.", ..., anyOf=kinds)


class SamplingFields(Body):
    """Parameters by OpenAI's and vLLM's names."""

    temperature: float | None = bounds("Sampling temperature; 0 is greedy.", 0, 100)
    top_k: int | None = bounds(
        "Number of most likely tokens to sample from; 0 or -1 samples from all.", -1
    )
    top_p: float | None = bounds(
        "Cumulative probability of the most likely tokens to sample from.", 0, 1
    )
    min_p: float | None = bounds(
        "Minimum probability of a token, relative to that of the most likely token.", 0, 1
    )
    repetition_penalty: float | None = bounds(
        "Divides positive and multiplies negative logits of tokens in the prompt or the output.",
        0.01,
        100,
    )
    presence_penalty: float | None = bounds(
        "Subtracted from the logits of tokens in the output.", -2, 2
    )
    frequency_penalty: float | None = bounds(
        "Subtracted from a token's logit once for each of its occurrences in the output.", -2, 2
    )
    seed: int | None = bounds(
        "Random seed, which makes sampling reproducible, except for rounding; -1 is random.",
        -(2**63),
        2**63 - 1,
    )
    ignore_eos: bool | None = described(
        "Whether to generate past the model's end-of-sequence tokens."
    )
    disable_spec_decode: bool | None = described(
        "Whether tokens are generated one by one, although the server speculates; only affects "
        "speed."
    )
    # The validator checks its length before its entries.
    stop: Any = described(
        "Strings that end the output.",
        anyOf=[_ONE_STOP, {"type": "array", "items": _ONE_STOP, "maxItems": MAX_STOP}],
    )
    logit_bias: Any = described(
        "Token ids and the biases added to their logits.",
        type="object",
        propertyNames={"pattern": "^[0-9]{1,10}$"},
        additionalProperties={"type": "number", "minimum": -100, "maximum": 100},
        maxProperties=MAX_LOGIT_BIAS,
    )
    skip_special_tokens: bool = described("Whether special tokens are left out of the text.", True)
    include_stop_str_in_output: bool = described(
        "Whether the text includes the stop string or token that ended it.", False
    )
    # Read when used, so that an error names the innermost field.
    structured_outputs: Any = described(
        "A constraint on the output: one of `json`, `regex`, `choice`, `grammar`, `json_object` "
        "and `structural_tag`.",
        **named_schema("StructuredOutputs"),
    )
    request_id: str | None = described(
        "The same as the header X-Request-Id; if both are set, they must be equal."
    )
    priority: int = described(
        "Requests with a lower value are served earlier, and may preempt running requests of the "
        "same tenant with a higher value.",
        0,
        minimum=-(2**31),
        maximum=2**31 - 1,
    )
    cache_salt: str | None = cache_salt_field()

    def client_id(self, header: str | None) -> str | None:
        """Return the client's own id of the call. Raises InvalidRequestError."""
        if self.request_id is None:
            return header
        if any(character > _LAST_OF_LATIN_1 for character in self.request_id):
            raise invalid_field(
                "request_id",
                "may only contain characters of Latin-1: responses have it in the header "
                "X-Request-Id.",
            )
        if header is None:
            return self.request_id
        if self.request_id != header:
            raise invalid_field(
                "request_id", "and the header X-Request-Id must be equal if both are set."
            )
        return header

    def add_structured_outputs(self, requested: RequestedStructure) -> None:
        """Request the structure of `structured_outputs`. Raises InvalidRequestError."""
        if self.structured_outputs is not None:
            outputs = read_part(StructuredOutputs, self.structured_outputs, "structured_outputs")
            requested.add_outputs(outputs, "structured_outputs")

    def common_sampling(self) -> dict[str, object]:
        """Return the fields of SamplingParams that the client set. Raises InvalidRequestError."""
        given: dict[str, object] = {
            name: value for name in _NAMES if (value := getattr(self, name)) is not None
        }
        if self.stop is not None:
            given["stop"] = _stop_of(self.stop)
        if self.logit_bias is not None:
            given["logit_bias"] = _bias_of(self.logit_bias)
        return given


def _stop_of(given: object) -> object:
    if isinstance(given, str):
        return (given,) if given else ()
    return tuple(given) if isinstance(given, list) else given


def _bias_of(given: object) -> dict[object, object]:
    if given == []:
        # PHP's empty object.
        return {}
    if not isinstance(given, dict):
        raise invalid_field("logit_bias", "must be an object that maps token ids to numbers.")
    wrong = next((name for name in given if not _INTEGER.fullmatch(name)), None)
    if wrong is not None:
        raise invalid_field("logit_bias", f'maps token ids, such as "5", and not {quote(wrong)}.')
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid_field(f"logit_bias.{name}", f"must be a number, not {quote_json(value)}.")
    return {int(name): value for name, value in given.items()}


class StructuredOutputs(BodyPart):
    """The structure of the output; exactly one of these."""

    json_: Any = Field(  # Any: a JSON Schema, as an object or a string
        None,
        alias="json",
        description="A JSON Schema, as an object or a string.",
        json_schema_extra={"type": ["object", "string"]},
    )
    regex: str | None = described("A regular expression.")
    choice: Any = described(  # Any: checked when it is compiled
        "The strings to choose from.", type="array", items={"type": "string"}
    )
    grammar: str | None = described("A grammar in EBNF.")
    json_object: bool | None = described("True allows any JSON object.")
    structural_tag: Any = described(  # Any: as the schema
        "A structural tag, as an object or a string of JSON.", type=["object", "string"]
    )


class JsonSchemaFormat(BodyPart):
    """A JSON Schema and its name."""

    name: str
    description: str | None = None
    schema_: Any = Field(  # Any: a JSON Schema
        alias="schema", json_schema_extra={"type": ["object", "string"]}
    )
    strict: bool | None = None


class ResponseFormat(BodyPart):
    """The format of the output."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: Any = Field(  # Any: read only if the type requires it
        None, json_schema_extra=named_schema("JsonSchemaFormat")
    )
    structures: Any = described(  # Any: read with the structure, as the two that follow
        "The parts of a structural tag, with `begin`, `schema` and `end`.",
        type="array",
        items={"type": "object"},
    )
    triggers: Any = described(
        "The beginnings of the parts of a structural tag that end free text.",
        type="array",
        items={"type": "string"},
    )
    format: Any = described("A structural tag of nested parts.", type="object")


class RequestedStructure:
    """Collects the parameters that request a structure; at most one may be set."""

    def __init__(self) -> None:
        self.structure: Structure | None = None
        self.param: str | None = None
        """The parameter that requests it."""

    def add_structure(self, kind: StructureKind, text: str, param: str) -> None:
        """Request a structure. Raises InvalidRequestError for a second structure."""
        if self.param is not None:
            raise invalid_field(param, f"and {self.param} cannot be used together.")
        self.structure = Structure(kind=kind, text=text)
        self.param = param

    def add_schema(self, given: object, param: str) -> None:
        """Request JSON of a schema, which is an object or a string. Raises InvalidRequestError."""
        text = _json_of(given, param, "a JSON Schema")
        self.add_structure("json_schema", text, param)

    def add_choices(self, given: object, param: str) -> None:
        """Request one of several strings."""
        self.add_structure("choice", _text_of(given, param), param)

    def add_tag(self, given: object, param: str) -> None:
        """Request a structural tag, which is an object or a string. Raises InvalidRequestError."""
        text = _json_of(given, param, "a structural tag")
        self.add_structure("structural_tag", text, param)

    def add_outputs(self, given: StructuredOutputs, param: str) -> None:
        """Request the structure of vLLM's `structured_outputs`. Raises InvalidRequestError."""
        if given.json_ is not None:
            self.add_schema(given.json_, f"{param}.json")
        if given.regex is not None:
            self.add_structure("regex", given.regex, f"{param}.regex")
        if given.choice is not None:
            self.add_choices(given.choice, f"{param}.choice")
        if given.grammar is not None:
            self.add_structure("grammar", given.grammar, f"{param}.grammar")
        if given.json_object:
            self.add_structure("json_object", "", f"{param}.json_object")
        if given.structural_tag is not None:
            self.add_tag(given.structural_tag, f"{param}.structural_tag")
        if self.param is None:
            raise invalid_field(
                param,
                "requires one of json, regex, choice, grammar, json_object and structural_tag.",
            )


def read_response_format(given: object, requested: RequestedStructure) -> None:
    """Request the structure of OpenAI's `response_format`. Raises InvalidRequestError."""
    param = "response_format"
    if isinstance(given, dict) and given.get("type") == "structural_tag":
        # Nulls in its schemas are values.
        kept = {name: one for name, one in given.items() if name not in _TAG_FIELDS}
        read_part(ResponseFormat, kept, param)
        requested.add_tag(given, param)
        return
    read = read_part(ResponseFormat, given, param)
    for name in _TAG_FIELDS:
        if getattr(read, name) is not None:
            raise invalid_field(f"{param}.{name}", "requires type = structural_tag.")
    if read.type == "json_schema":
        schema = read_part(JsonSchemaFormat, read.json_schema or {}, f"{param}.json_schema")
        requested.add_schema(schema.schema_, f"{param}.json_schema.schema")
        return
    if read.json_schema is not None:
        raise invalid_field(f"{param}.json_schema", "requires type = json_schema.")
    if read.type == "json_object":
        requested.add_structure("json_object", "", param)


def _json_of(given: object, param: str, what: str) -> str:
    """Return JSON that is given as an object or a string. Raises InvalidRequestError."""
    if not isinstance(given, str | dict):
        raise invalid_field(param, f"must be {what}.")
    return given if isinstance(given, str) else _text_of(given, param)


def _text_of(given: object, param: str) -> str:
    return json_text(given, param, most_bytes=MAX_TEXT_BYTES)
