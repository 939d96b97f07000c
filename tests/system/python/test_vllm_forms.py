"""Programs written for vLLM's Python API run unchanged, or the error names what to use instead."""

import inspect
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace

import pagedray
from cluster.engine.engine_options import EngineOptions
from cluster.engine.vllm_options import own_options, token_count
from cluster.llm.options import LLMOptions
from pagedray import LLM, AsyncLLM, SamplingParams
from pagedray.errors import InvalidRequestError, StartupError
from tests.system.engines import open_llm
from tests.system.server_process import TINY_LLAMA

GREEDY = SamplingParams(temperature=0, max_tokens=6)
TEXT = "class Queue:"
TOOL = {"type": "function", "function": {"name": "look"}}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        str(TINY_LLAMA),
        seed=7,
        dtype="float",
        distributed_executor_backend="mp",
        device="cpu",
        num_threads=1,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=True,
        max_model_len="0.5K",
        swap_space=4,
        trust_remote_code=False,
        quantization=None,
        load_format="safetensors",
        disable_log_stats=True,
        show_progress=False,
    ) as engine:
        yield engine


def test_results_have_their_shape(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    (result,) = llm.generate([TEXT], sampling_params=params, use_tqdm=False)
    assert result.prompt == TEXT
    assert result.finished
    assert list(result.prompt_token_ids) == llm.get_tokenizer().encode(TEXT)
    (output,) = result.outputs
    assert llm.get_tokenizer().decode(output.token_ids) == output.text
    assert output.finish_reason == "length"
    assert output.logprobs is not None
    chosen = [
        found[token_id].logprob
        for token_id, found in zip(output.token_ids, output.logprobs, strict=True)
    ]
    assert output.cumulative_logprob == pytest.approx(sum(chosen))
    assert [found[token_id].rank for token_id, found in zip(output.token_ids, output.logprobs,
            strict=True)] == [1] * 4  # fmt: skip
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)


def test_allowed_tokens_are_those_of_transformers(llm: LLM) -> None:
    token_ids = llm.get_tokenizer().encode(TEXT)
    allowed = list(range(40, 90))
    params = SamplingParams(temperature=0.0, max_tokens=12, allowed_token_ids=allowed)
    (result,) = llm.generate({"prompt_token_ids": token_ids}, params, use_tqdm=False)
    # Any: the method's own annotation excludes this class.
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32)
    expected = model.generate(
        torch.tensor([token_ids]),
        max_new_tokens=12,
        do_sample=False,
        prefix_allowed_tokens_fn=lambda *_: allowed,
    )
    assert list(result.outputs[0].token_ids) == expected[0, len(token_ids) :].tolist()


def test_bad_words_are_those_of_transformers(llm: LLM) -> None:
    token_ids = llm.get_tokenizer().encode(TEXT)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    (plain,) = llm.generate(TEXT, params, use_tqdm=False)
    words = ["sequently", "def __", "self"]
    assert all(word in plain.outputs[0].text for word in words)
    (result,) = llm.generate(TEXT, replace(params, bad_words=words), use_tqdm=False)
    encode = partial(llm.get_tokenizer().encode, add_special_tokens=False)
    sequences = [encode(text) for word in words for text in (word, f" {word}")]
    assert [len(one) for one in sequences] == [4, 4, 2, 2, 1, 1]
    # Any: the method's own annotation excludes this class.
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32)
    expected = model.generate(
        torch.tensor([token_ids]),
        max_new_tokens=24,
        do_sample=False,
        bad_words_ids=sequences,
    )
    assert list(result.outputs[0].token_ids) == expected[0, len(token_ids) :].tolist()


def test_prompts_take_every_form(llm: LLM) -> None:
    token_ids = llm.get_tokenizer().encode(TEXT)
    forms: list[Any] = [
        TEXT,
        token_ids,
        {"prompt": TEXT},
        {"prompt_token_ids": token_ids},
        {"prompt": TEXT, "cache_salt": "a"},
    ]
    texts = {one.outputs[0].text for one in llm.generate(forms, GREEDY, use_tqdm=False)}
    assert len(texts) == 1
    for form in forms:
        (alone,) = llm.generate(form, GREEDY, use_tqdm=False)
        assert {alone.outputs[0].text} == texts


@pytest.mark.parametrize(
    "convert", [np.array, torch.tensor, lambda ids: list(np.array(ids)), lambda ids: range(5, 9)]
)
def test_token_ids_of_other_libraries_are_one_prompt(
    llm: LLM, convert: Callable[[list[int]], Any]
) -> None:
    given = convert([5, 6, 7, 8])
    (expected,) = llm.generate([[5, 6, 7, 8]], GREEDY, use_tqdm=False)
    (alone,) = llm.generate(given, GREEDY, use_tqdm=False)
    both = llm.generate([given, given], GREEDY, use_tqdm=False)
    for result in (alone, *both):
        assert result.prompt_token_ids == expected.prompt_token_ids
        assert result.outputs[0].token_ids == expected.outputs[0].token_ids
    assert "".join(llm.stream(given, GREEDY)) == expected.outputs[0].text


def test_matrix_has_a_prompt_in_each_row(llm: LLM) -> None:
    for rows in ([[5], [6]], [[5, 6], [7, 8]]):
        for matrix in (np.array(rows), torch.tensor(rows), list(torch.tensor(rows))):
            results = llm.generate(matrix, GREEDY, use_tqdm=False)  # type: ignore[arg-type]  # no sequence
            assert [list(one.prompt_token_ids) for one in results] == rows


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ({"prompt": TEXT, "multi_modal_data": {}}, "'multi_modal_data' is not supported"),
        ({}, "must have a string as prompt"),
        ({"prompt": 5}, "must have a string as prompt"),
        ({"prompt_token_ids": "ab"}, "lists of token ids"),
        ([["a"]], "lists of token ids"),
        ([5.5], "lists of token ids"),
        (b"class", "lists of token ids"),
        ([b"class"], "lists of token ids"),
        ([True], "lists of token ids"),
        (torch.tensor(5), "lists of token ids"),
        ({TEXT}, "lists of token ids"),
        (torch.tensor([True, False]), "lists of token ids"),
        (np.array([1.0, 2.0]), "lists of token ids"),
        ([5, [6]], "lists of token ids"),
        (None, "lists of token ids"),
        (5, "lists of token ids"),
    ],
)
def test_other_prompts_are_rejected(llm: LLM, prompt: Any, text: str) -> None:  # Any: what is wrong
    with pytest.raises(InvalidRequestError, match=text) as caught:
        llm.generate(prompt, GREEDY, use_tqdm=False)
    if text == "lists of token ids" and not isinstance(prompt, dict):
        assert caught.value.param == "prompts"
        with pytest.raises(InvalidRequestError, match="prompt must be texts or lists"):
            next(llm.stream(prompt, GREEDY))


def test_chat_takes_one_conversation_or_many(llm: LLM) -> None:
    one: list[dict[str, object]] = [{"role": "user", "content": "What is deque?"}]
    other: list[dict[str, object]] = [
        {"role": "user", "content": [{"type": "text", "text": "What does put do?"}]}
    ]
    (alone,) = llm.chat(one, GREEDY, use_tqdm=False)
    conversations = [one, other]
    both = llm.chat(conversations, GREEDY, use_tqdm=False)
    assert len(both) == 2
    assert both[0].outputs[0].text == alone.outputs[0].text
    with pytest.raises(InvalidRequestError, match="role must be one of"):
        llm.chat([{"role": "god", "content": "x"}], GREEDY, use_tqdm=False)


@pytest.mark.parametrize("messages", ["hi", {"role": "user", "content": "hi"}, ["hi"], 5, None])
def test_other_conversations_are_rejected(llm: LLM, messages: Any) -> None:  # Any: what is wrong
    with pytest.raises(InvalidRequestError, match="messages must be a list of dictionaries"):
        llm.chat(messages, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"tools": 5}, "tools must be a list"),
        ({"tools": {"type": "function"}}, "tools.0 must be an object"),
        ({"tools": [5]}, "tools.0 must be an object"),
        ({"chat_template": 5}, "chat_template must be a string"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs must be a dictionary"),
        ({"messages": [{"role": "user", "images": [b"x"]}]}, "messages.0.images is not supported"),
        ({"tools": [TOOL, TOOL]}, "tools must have unique names"),
        ({"continue_final_message": "no"}, "continue_final_message must be true or false"),
        ({"add_generation_prompt": 1}, "add_generation_prompt must be true or false"),
        ({"chat_template_kwargs": {5: 1}}, "chat_template_kwargs must have names of variables"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages is not supp"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message requires add_generation_prompt = false",
        ),
    ],
)
def test_other_values_for_chats_are_rejected(llm: LLM, wrong: Any, text: str) -> None:
    given = {"messages": [{"role": "user", "content": "x"}], **wrong}
    with pytest.raises(InvalidRequestError, match=text):
        llm.chat(sampling_params=GREEDY, use_tqdm=False, **given)


def test_chat_continues_the_last_message(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "class Q"}]
    rest = [
        llm.chat(conversation, GREEDY, add_generation_prompt=begins, continue_final_message=True)[0]
        for begins in (None, False)
    ]
    text = llm.get_tokenizer().decode(rest[0].prompt_token_ids)
    assert text.endswith("class Q")
    assert rest[0].prompt_token_ids == rest[1].prompt_token_ids
    (other,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    assert len(other.prompt_token_ids) > len(rest[0].prompt_token_ids)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, [{"max_tokens": 3}], "greedy", [None], 5])
def test_other_sampling_params_are_rejected(llm: LLM, params: Any) -> None:  # Any: what is wrong
    with pytest.raises(InvalidRequestError, match="sampling_params must be SamplingParams, not"):
        llm.generate([TEXT], params, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="sampling_params must be SamplingParams, not"):
        next(llm.stream(TEXT, params))


def test_chat_takes_a_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "x = 1"}]
    template = "{% for one in messages %}{{ one.content + mood }}{% endfor %}"
    (result,) = llm.chat(
        conversation, GREEDY, chat_template=template, chat_template_kwargs={"mood": "; y"}
    )
    (plain,) = llm.generate("x = 1; y", GREEDY)
    assert result.prompt_token_ids == plain.prompt_token_ids
    assert result.outputs[0].token_ids == plain.outputs[0].token_ids
    (usual,) = llm.chat(conversation, GREEDY)
    assert usual.prompt_token_ids != result.prompt_token_ids
    with pytest.raises(InvalidRequestError, match="has an invalid chat template: unexpected"):
        llm.chat(conversation, GREEDY, chat_template="{{ '' ")


def test_sampling_takes_their_forms(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, stop="\n", top_k=-1)
    (result,) = llm.generate("def parse(text): return text", params, use_tqdm=False)
    assert "\n" not in result.outputs[0].text
    assert result.outputs[0].finish_reason == "stop"
    kept = SamplingParams(
        temperature=0, max_tokens=None, stop=["\n"], include_stop_str_in_output=True
    )
    (result,) = llm.generate("def parse(text): return text", kept, use_tqdm=False)
    assert result.outputs[0].text.endswith("\n")
    bare = SamplingParams(temperature=0, max_tokens=3, detokenize=False)
    (result,) = llm.generate(TEXT, bare, use_tqdm=False)
    assert (result.outputs[0].text, len(result.outputs[0].token_ids)) == ("", 3)


def test_none_is_the_same_as_no_entries() -> None:
    params = SamplingParams(
        stop=None,
        stop_token_ids=None,
        allowed_token_ids=None,
        logprob_token_ids=None,
        bad_words=None,
        logit_bias=None,
        thinking_token_budget=-1,
    )
    assert params == SamplingParams()


@pytest.mark.parametrize(
    "name", ["detokenize", "skip_special_tokens", "include_stop_str_in_output", "output_kind"]
)
@pytest.mark.parametrize("wrong", ["no", 1, None], ids=str)
def test_other_kinds_of_switches_are_rejected(name: str, wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} must be .*, not"):
        SamplingParams(**{name: wrong})


@pytest.mark.parametrize("method", ["generate", "chat", "beam_search", "embed", "score"])
def test_arguments_of_vllm_that_are_not_there_name_an_alternative(llm: LLM, method: str) -> None:
    call = getattr(llm, method)
    for given, text in (
        ({"lora_request": object()}, "is not supported: merge the adapter into the weights"),
        ({"priority": [1]}, "priority = a list is not supported: only requests to a server"),
        ({"priority": False}, "priority = False is not supported"),
        ({"chat_template_content_format": "parts"}, "'parts' is not supported: the form"),
    ):
        with pytest.raises(InvalidRequestError, match=text) as caught:
            call(TEXT, **given)
        assert caught.value.param in given
    with pytest.raises(TypeError, match="'prioritty'"):
        call(TEXT, prioritty=None)


def test_defaults_of_their_arguments_are_taken(llm: LLM) -> None:
    given: dict[str, Any] = {"lora_request": None, "priority": 0, "tokenization_kwargs": None}
    (result,) = llm.generate(TEXT, GREEDY, use_tqdm=False, **given)
    (plain,) = llm.generate(TEXT, GREEDY, use_tqdm=False)
    assert result.outputs[0].text == plain.outputs[0].text


def test_seed_makes_results_repeat() -> None:
    def sampled(seed: int) -> list[str]:
        with open_llm(seed=seed) as llm:
            results = llm.generate([TEXT] * 2, SamplingParams(max_tokens=12), use_tqdm=False)
            return [one.outputs[0].text for one in results]

    first = sampled(1)
    assert first == sampled(1)
    assert first[0] != first[1]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("pipeline_parallel_size", 2, "use tensor_parallel_size"),
        ("enable_lora", True, "^enable_lora is not supported: merge the adapter"),
        ("weight_transfer_config", {"a": 1}, "^weight_transfer_config is not supported: weights"),
        ("max_num_batched_tokens", "many", "^max_num_batched_tokens must be a number of tokens"),
        ("tensor_paralel_size", 2, "did you mean tensor_parallel_size"),
        ("max_model_len", "many", "such as 32768, 32K or auto, not 'many'"),
    ],
)
def test_what_is_not_there_is_rejected(name: str, value: object, text: str) -> None:
    with pytest.raises(StartupError, match=text):
        own_options({name: value})


def test_values_are_translated() -> None:
    given = {
        "dtype": "auto",
        "kv_cache_dtype": "fp8",
        "max_model_len": "32K",
        "quantization": "awq_marlin",
    }
    assert own_options(given) == {
        "dtype": None,
        "kv_cache_dtype": "fp8_e4m3",
        "max_model_len": 32768,
        "quantization": "awq",
    }
    assert [token_count(text, "a") for text in ("1000", "1k", "auto")] == [1000, 1000, None]


def test_options_that_cannot_change_a_token_are_taken() -> None:
    given = {
        "async_scheduling": True,
        "compilation_config": {"level": 3},
        "guided_decoding_backend": "xgrammar",
        "limit_mm_per_prompt": {"image": 0},
        "max_logprobs": 20,
    }
    assert own_options(given) == {}


def test_editors_know_every_option() -> None:
    names = {field.name for field in fields(EngineOptions)}
    # The seed is an argument of its own.
    assert names - {"seed"} <= LLMOptions.__annotations__.keys()


def test_public_names_are_listed() -> None:
    assert dir(pagedray) == sorted(pagedray.__all__)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sleep", "close() frees all memory"),
        ("wake_up", "close() frees all memory"),
        ("reset_prefix_cache", "another cache_salt"),
        ("collective_rpc", "counters are in stats()"),
        ("get_metrics", "use stats()"),
        ("llm_engine", "the engine is private"),
        ("model_config", "GET /server_info"),
        ("encode", "use embed() or score()"),
        ("classify", "use score()"),
        ("start_profile", "py-spy"),
        ("enqueue", "pass all prompts to generate()"),
        ("add_lora", "merge the adapter"),
        ("update_weights", "weights are loaded once"),
        ("generat", "did you mean 'generate'?"),
        ("vocabulary_size", "did you mean 'vocab_size'?"),
    ],
)
def test_methods_of_vllm_name_an_alternative(llm: LLM, name: str, text: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(llm, name)
    assert str(caught.value).startswith(f"'LLM' object has no attribute '{name}'")
    assert text in str(caught.value)


def test_asynchronous_class_has_its_own_names() -> None:
    one = object.__new__(AsyncLLM)
    for name, text in (("sleep", "shutdown() frees"), ("is_running", "await check_health()")):
        with pytest.raises(AttributeError, match=re.escape(text)):
            getattr(one, name)


def test_classes_are_shown_as_they_are_imported(llm: LLM) -> None:
    assert repr(llm) == (
        f"LLM({TINY_LLAMA.name!r}, device='cpu', dtype='float32', tensor_parallel_size=1, "
        "executor='local')"
    )
    assert repr(object.__new__(AsyncLLM)) == "<AsyncLLM without a model>"
    assert str(LLM) == "<class 'pagedray.LLM'>"
    assert {LLM.generate.__module__, AsyncLLM.chat.__module__} == {"pagedray"}
    assert "temperature: float = 1.0" in str(inspect.signature(SamplingParams))
    assert pickle.loads(pickle.dumps(GREEDY)) == GREEDY


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("max_token", 1, "Unexpected keyword argument 'max_token'; did you mean 'max_tokens'?"),
        ("temprature", 1, "did you mean 'temperature'?"),
        ("frobnicate", 1, "Unexpected keyword argument 'frobnicate'"),
        ("guided_decoding", {}, "guided_decoding is not supported: use structure, a Structure."),
        ("structured_outputs", {"json": {}}, "is not supported: use structure, a Structure."),
        ("logits_processors", [print], "logits_processors is not supported: third-party code"),
        ("best_of", 2, "best_of is not supported: it is a parameter of requests over HTTP."),
        ("use_beam_search", True, "call beam_search()"),
        ("truncate_prompt_tokens", 8, "truncate prompts in the program"),
        ("extra_args", {"a": 1}, "extra_args is not supported"),
        ("repetition_detection", {"a": 1}, "use repetition_penalty"),
        ("spaces_between_special_tokens", False, "must be True, not False"),
    ],
)
def test_parameters_that_are_not_there_name_an_alternative(
    name: str, value: object, text: str
) -> None:
    given: dict[str, Any] = {name: value}  # Any: a field that the class lacks
    with pytest.raises((TypeError, InvalidRequestError), match=re.escape(text)):
        SamplingParams(**given)


def test_parameters_that_ask_for_nothing_are_taken() -> None:
    given: dict[str, Any] = {  # Any: fields that the class lacks
        **dict.fromkeys(("guided_decoding", "structured_outputs", "logits_processors", "best_of")),
        **{"use_beam_search": False, "skip_clone": True, "flat_logprobs": False},
        **{"spaces_between_special_tokens": True, "extra_args": {}, "best_of": 1},
    }
    assert SamplingParams(top_k=3, **given) == SamplingParams(top_k=3)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("AsyncEngineArgs", "pass the options to LLM or AsyncLLM"),
        ("LLMEngine", "use AsyncLLM"),
        ("RequestOutput", "use Generation"),
        ("StructuredOutputsParams", "use Structure"),
    ],
)
def test_imports_name_an_alternative(name: str, text: str) -> None:
    with pytest.raises(ImportError, match=f"pagedray has no {name}: {text}"):
        exec(f"from pagedray import {name}")
