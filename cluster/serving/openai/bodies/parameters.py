"""Parameters of OpenAI, vLLM and SGLang that bodies ignore, or reject with a reason.

`docs/compatibility.md` is made from these tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, JsonValue

from cluster.serving.inputs import MAX_SALT_LENGTH

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.serving.schema.body import Defaults

__all__ = [
    "CHAT_REJECTED",
    "CHAT_WITHOUT_EFFECT",
    "IGNORED",
    "IN_IGNORED",
    "MODERATION",
    "REJECTED",
    "UNLIMITED",
    "WITHOUT_EFFECT",
    "bounds",
    "cache_salt_field",
    "model_field",
    "prompts_field",
    "template_variables_field",
    "thinking_budget",
    "thinking_budget_field",
]

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
    return Field(None, description=description, json_schema_extra=known)


def cache_salt_field() -> Any:  # Any: a pydantic field
    """Return a field that restricts which requests share prefixes, by vLLM's name."""
    return Field(
        None,
        description="Prefixes are shared only by requests with the same salt.",
        json_schema_extra={"minLength": 1, "maxLength": MAX_SALT_LENGTH},
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
    return Field(
        None,
        description="Variables for the model's chat template, such as `enable_thinking`; those "
        "that it does not read are ignored.",
        json_schema_extra={"type": "object"},
    )


def model_field() -> Any:  # Any: a pydantic field
    """Return a field with the name of the model, which clients may omit."""
    return Field(None, description="The name of the model, which `/v1/models` lists; optional.")


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
    return Field(
        description="A string or an array of token ids, or an array of either.",
        json_schema_extra={"anyOf": kinds},
    )
