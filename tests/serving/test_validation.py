"""Validation: its order, prompts, and models whose tokenizer or modules do not fit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import pytest

from cluster.serving.embedding_validator import (
    EmbeddingValidator,
    SentencePrompts,
    longest_text,
)
from cluster.serving.inputs import EmbeddingInput, GenerationInput
from cluster.serving.prompt_reader import PromptReader
from cluster.serving.text.template_arguments import ChatMessage, ChatPrompt, MessageToolCall
from cluster.serving.text.text_pool import TextPool
from cluster.serving.validator import Validator
from pagedray import LLM
from pagedray.config import SchedulerConfig
from pagedray.errors import CheckpointError, ContextLengthError, InvalidRequestError, RequestError
from pagedray.model_config import DenseModule, RecurrentConfig
from pagedray.sampling_params import Structure
from tests.serving.conftest import engine_config
from tests.system.server_process import TINY_LLAMA
from workers.models.config_json.sentence_modules import dense_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cluster.serving.text.tokenizer import Tokenizer
    from pagedray.config import EngineConfig
    from pagedray.model_config import Task


@pytest.fixture
def compiled_s() -> list[float]:
    """How long calls waited for their structures."""
    return []


@pytest.fixture
def validator(tokenizer: Tokenizer, compiled_s: list[float]) -> Iterator[Validator]:
    validator = Validator(
        engine_config(16), tokenizer, note_compile=lambda _, took_s: compiled_s.append(took_s)
    )
    yield validator
    validator.close()


@pytest.mark.parametrize(
    ("prompt", "error"),
    [("the quick fox " * 40, ContextLengthError), ("", InvalidRequestError)],
)
async def test_prompts_are_read_before_a_structure_is_compiled(
    validator: Validator, compiled_s: list[float], prompt: str, error: type[RequestError]
) -> None:
    # It would be rejected as well.
    structure = Structure(kind="regex", text="(?=a)")
    given = GenerationInput(prompts=("the", prompt), sampling={"structure": structure})
    with pytest.raises(error) as caught:
        await validator.validate(given)
    assert getattr(caught.value, "param", None) == "prompt"
    assert compiled_s == []
    given = GenerationInput(prompts=("the",), sampling={"structure": structure})
    with pytest.raises(InvalidRequestError) as caught:
        await validator.validate(given)
    assert caught.value.param == "structure"
    assert len(compiled_s) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"mark": 5},
        {"mark": "\ud800"},
        {"headers": 5},
        {"headers": [("a", "b")]},
        {"headers": (("a", 5),)},
        {"headers": ("ab",)},
    ],
)
async def test_structures_of_other_types_do_not_reach_the_compiler(
    validator: Validator,
    compiled_s: list[float],
    fields: dict[str, Any],  # Any: what is wrong
) -> None:
    structure = Structure(kind="regex", text="a", **fields)
    with pytest.raises(InvalidRequestError) as caught:
        await validator.validate(
            GenerationInput(prompts=("the",), sampling={"structure": structure})
        )
    assert caught.value.param == "structure"
    assert compiled_s == []


class TestATokenizerLargerThanTheModel:
    """Its ids beyond the model's vocabulary would kill the rank that looks them up."""

    SIZE = 262

    @pytest.fixture
    def config(self) -> EngineConfig:
        config = engine_config()
        return replace(config, model=replace(config.model, vocab_size=self.SIZE))

    @pytest.mark.parametrize("repeats", [1, 300], ids=["short", "long"])
    async def test_texts_with_unknown_tokens_are_rejected(
        self, config: EngineConfig, tokenizer: Tokenizer, repeats: int
    ) -> None:
        text = "The quick brown fox " * repeats
        assert max(tokenizer.encode(text)) >= self.SIZE
        pool = TextPool()
        config = replace(config, model=replace(config.model, max_positions=10_000))
        validator = Validator(config, tokenizer, text_pool=pool)
        given = [
            GenerationInput(prompts=(text,)),
            GenerationInput(prompts=(ChatPrompt((ChatMessage("user", text),)),)),
        ]
        for one, param in zip(given, ("prompt", "messages"), strict=True):
            with pytest.raises(InvalidRequestError, match="the ids of the model are 0 to 261") as e:
                await validator.validate(one)
            assert e.value.param == param
        # Bytes are the first tokens.
        (request,) = await validator.validate(GenerationInput(prompts=("~~",)))
        assert max(request.prompt_token_ids) < self.SIZE
        await pool.close()
        validator.close()

    async def test_texts_to_embed_are_rejected_too(
        self, config: EngineConfig, tokenizer: Tokenizer
    ) -> None:
        validator = EmbeddingValidator(config, tokenizer)
        with pytest.raises(InvalidRequestError, match="the ids of the model are 0 to 261") as e:
            await validator.validate(EmbeddingInput(prompts=("~", "The quick brown fox")))
        assert e.value.param == "prompts"

    @pytest.mark.parametrize("task", ["generate", "embed"])
    def test_it_is_named_once_at_the_start(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        caplog: pytest.LogCaptureFixture,
        task: Task,
    ) -> None:
        config = replace(config, model=replace(config.model, task=task))
        Validator(config, tokenizer).close()
        EmbeddingValidator(config, tokenizer)
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert f"up to {tokenizer.vocab_size - 1}, but" in record.getMessage()
        assert "has only 262 tokens" in record.getMessage()


async def test_prompt_logprobs_are_bounded(tokenizer: Tokenizer) -> None:
    validator = Validator(engine_config(20_000), tokenizer)
    given = GenerationInput(prompts=((5,) * 13_000,), sampling={"prompt_logprobs": 20})
    with pytest.raises(InvalidRequestError, match=r"requests 273000 log-prob.* at most 262144"):
        await validator.validate(given)


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        # Two prompts of 3 tokens have three beams of up to 4 more tokens each: 42.
        (SchedulerConfig(max_queued_tokens=41), "n 3 has up to 42 tokens.* max_queued_tokens, 41"),
        (SchedulerConfig(max_queued_requests=5), "has 6 beams.* max_queued_requests, 5"),
        (SchedulerConfig(max_queued_tokens=42, max_queued_requests=6), None),
    ],
)
async def test_beams_that_no_queue_has_room_for_are_rejected(
    tokenizer: Tokenizer, limits: SchedulerConfig, text: str | None
) -> None:
    validator = Validator(replace(engine_config(16), scheduler=limits), tokenizer)
    given = GenerationInput(
        prompts=((2, 3, 4), (2, 3, 4)),
        sampling={"n": 3, "max_tokens": 4},
        beam_length_penalty=1.0,
    )
    if text is None:
        assert len(await validator.validate(given)) == 2
    else:
        with pytest.raises(InvalidRequestError, match=text) as caught:
            await validator.validate(given)
        assert caught.value.param == "n"
    # Sampled sequences share a request.
    assert len(await validator.validate(replace(given, beam_length_penalty=None))) == 2
    one_beam = replace(given, prompts=((2,) * 15,), sampling={"n": 1, "max_tokens": 1})
    assert len(await validator.validate(one_beam)) == 1
    validator.close()


async def test_seeds_of_requests_follow_that_of_the_engine(tokenizer: Tokenizer) -> None:
    given = GenerationInput(prompts=("the", "the"), sampling={})
    own = GenerationInput(prompts=("the",), sampling={"seed": 3})

    async def seeds(seed: int | None) -> list[int]:
        validator = Validator(replace(engine_config(64), seed=seed), tokenizer)
        found = [
            one.seed
            for given_one in (given, own, given)
            for one in await validator.validate(given_one)
        ]
        validator.close()
        return found

    first = await seeds(7)
    assert first == await seeds(7)
    assert first[2] == 3
    assert len({*first, *await seeds(8), *await seeds(None), *await seeds(None)}) == 17


async def test_only_conversations_of_a_model_with_states_have_anchors(tokenizer: Tokenizer) -> None:
    chat = ChatPrompt((ChatMessage("system", "the cat"), ChatMessage("user", "the dog")))
    given = GenerationInput(prompts=(chat, "the cat"), sampling={})
    config = engine_config(256)
    states = RecurrentConfig(kind="short_conv", layers=(0,), conv_width=3)
    recurrent = replace(config, model=replace(config.model, recurrent=states))
    anchors = {}
    for one in (config, recurrent):
        validator = Validator(one, tokenizer)
        anchors[one.model.has_states] = [
            request.anchors for request in await validator.validate(given)
        ]
        [cut] = await validator.validate(replace(given, prompts=(chat,), max_prompt_tokens=9))
        assert cut.anchors == ()
        validator.close()
    assert anchors[False] == [(), ()]
    assert anchors[True][0]
    assert anchors[True][1] == ()


Given = ParamSpec("Given")
Result = TypeVar("Result")


class CountingPool(TextPool):
    """Counts what is rendered in threads."""

    num_runs = 0

    async def run_in_thread(
        self, tenant: str, work: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs
    ) -> Result:
        self.num_runs += 1
        return await super().run_in_thread(tenant, work, *args, **kwargs)


def tool(num_parameters: int) -> dict[str, object]:
    properties = {f"parameter {number}": {"type": "string"} for number in range(num_parameters)}
    return {"type": "function", "function": {"name": "f", "parameters": properties}}


@pytest.mark.parametrize(
    ("tools", "num_runs"),
    [((), 0), ((tool(8),) * 4, 0), ((tool(64),) * 4, 1), ((tool(1024),), 1)],
    ids=["none", "small", "several", "large"],
)
async def test_large_tools_are_rendered_in_a_thread(
    tokenizer: Tokenizer, tools: tuple[dict[str, object], ...], num_runs: int
) -> None:
    prompt = ChatPrompt((ChatMessage("user", "x"),), tools)
    assert await num_runs_of(prompt, tokenizer) == num_runs


@pytest.mark.parametrize(("num_arguments", "num_runs"), [(8, 0), (1024, 1)])
async def test_large_arguments_are_rendered_in_a_thread(
    tokenizer: Tokenizer, num_arguments: int, num_runs: int
) -> None:
    arguments = {f"argument {number}": "x" for number in range(num_arguments)}
    call = MessageToolCall(id="a", name="f", arguments=arguments)
    prompt = ChatPrompt((ChatMessage("assistant", "", tool_calls=(call,)),))
    assert await num_runs_of(prompt, tokenizer) == num_runs


async def num_runs_of(prompt: ChatPrompt, tokenizer: Tokenizer) -> int:
    pool = CountingPool()
    reader = PromptReader(engine_config(), tokenizer, text_pool=pool)
    await reader.read_prompt(prompt, is_long=False, tenant="ann")
    await pool.close()
    return pool.num_runs


def write_modules(folder: Path, *kinds: str) -> None:
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{one}",
            "type": f"sentence_transformers.models.{one}",
        }
        for index, one in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))


def test_modules_that_run_here_are_accepted(tmp_path: Path) -> None:
    dense_modules(tmp_path, 8)
    write_modules(tmp_path, "Transformer", "Pooling", "Normalize")
    dense_modules(tmp_path, 8)


@pytest.mark.parametrize("kind", ["LSTM", "LayerNorm", "WeightedLayerPooling", "CNN"])
def test_a_module_that_would_change_vectors_is_rejected(kind: str, tmp_path: Path) -> None:
    write_modules(tmp_path, "Transformer", "Pooling", kind)
    with pytest.raises(CheckpointError, match=rf"2\.type names the module '{kind}'; supported"):
        dense_modules(tmp_path, 8)


def write_dense(folder: Path, name: str, **settings: object) -> None:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "config.json").write_text(json.dumps(settings))


def test_linear_layers_after_pooling_are_read_in_their_order(tmp_path: Path) -> None:
    write_modules(tmp_path, "Transformer", "Pooling", "Dense", "Dense", "Normalize")
    identity = "torch.nn.modules.linear.Identity"
    settings = {"out_features": 32, "bias": False, "activation_function": identity}
    write_dense(tmp_path, "2_Dense", in_features=8, **settings)
    write_dense(tmp_path, "3_Dense", in_features=32, out_features=6)
    first, second = dense_modules(tmp_path, 8)
    assert first == DenseModule(
        folder="2_Dense", in_size=8, out_size=32, has_bias=False, activation="identity"
    )
    assert (second.out_size, second.has_bias, second.activation) == (6, True, "tanh")


@pytest.mark.parametrize(
    ("kinds", "settings", "part"),
    [
        (("Pooling", "Dense"), {"in_features": 9, "out_features": 4}, "in_features must be 8"),
        (("Pooling", "Dense"), {"in_features": 8}, "out_features is missing"),
        (
            ("Pooling", "Dense"),
            {"in_features": 8, "out_features": 4, "activation_function": "x.GELU"},
            "activation_function must be one of torch.nn.modules.activation.Tanh",
        ),
        (
            ("Pooling", "Dense"),
            {"in_features": 8, "out_features": 4, "module_input_name": "token_embeddings"},
            "module_input_name must be one of sentence_embedding",
        ),
        (
            ("Pooling", "Dense"),
            {"in_features": 8, "out_features": 4, "residual": True},
            "residual is not a field of Dense",
        ),
        (("Pooling", "Normalize", "Dense"), {}, "type names Dense after Normalize"),
        (("Dense", "Pooling"), {}, "type names Pooling after Dense"),
    ],
)
def test_a_linear_layer_that_is_not_supported_is_named(
    kinds: tuple[str, ...], settings: dict[str, object], part: str, tmp_path: Path
) -> None:
    write_modules(tmp_path, "Transformer", *kinds)
    write_dense(tmp_path, f"{kinds.index('Dense') + 1}_Dense", **settings)
    with pytest.raises(CheckpointError, match=part):
        dense_modules(tmp_path, 8)


@pytest.mark.parametrize("path", ["..", "../2_Dense", "/etc", "", "2_Dense/..", "a\0b", "2_D\n"])
def test_a_folder_elsewhere_is_rejected(path: str, tmp_path: Path) -> None:
    module = {"path": path, "type": "sentence_transformers.models.Dense"}
    (tmp_path / "modules.json").write_text(json.dumps([module]))
    with pytest.raises(
        CheckpointError, match=r"0\.path must be a folder such as 2_Dense"
    ) as caught:
        dense_modules(tmp_path, 8)
    assert "\n" not in str(caught.value)


def test_a_linear_layer_without_its_settings_is_named(tmp_path: Path) -> None:
    write_modules(tmp_path, "Transformer", "Pooling", "Dense")
    with pytest.raises(CheckpointError, match=r"2_Dense/config\.json cannot be read"):
        dense_modules(tmp_path, 8)


@pytest.mark.parametrize("text", ["{}", "[1]", "[", '[{"type": 3}]', "[{}]"])
def test_a_broken_list_of_modules_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        dense_modules(tmp_path, 8)


@pytest.mark.parametrize(
    ("settings", "longest"),
    [({}, 512), ({"max_seq_length": 256}, 256), ({"max_seq_length": 4096}, 512)],
)
def test_the_longest_text_is_that_of_the_checkpoint(
    settings: dict[str, object], longest: int, tmp_path: Path
) -> None:
    assert longest_text(tmp_path, 512) == 512
    path = tmp_path / "sentence_bert_config.json"
    path.write_text(json.dumps(settings | {"do_lower_case": False}))
    assert longest_text(tmp_path, 512) == longest


def test_text_that_would_become_lower_case_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    with pytest.raises(CheckpointError, match="do_lower_case must be false, not true"):
        longest_text(tmp_path, 512)


QUERY = "Instruct: Find it\nQuery:"


def write(folder: Path, **values: object) -> None:
    (folder / "config_sentence_transformers.json").write_text(json.dumps(values))


def test_a_checkpoint_without_prompts_has_none(tmp_path: Path) -> None:
    prompts = SentencePrompts.from_folder(tmp_path)
    assert prompts.prompt(None) == ""
    with pytest.raises(InvalidRequestError, match="which has none, not 'query'"):
        prompts.prompt("query")


def test_a_prompt_is_found_by_its_name(tmp_path: Path) -> None:
    write(tmp_path, prompts={"query": QUERY, "document": ""}, default_prompt_name=None)
    prompts = SentencePrompts.from_folder(tmp_path)
    assert [prompts.prompt(name) for name in ("query", "document", None)] == [QUERY, "", ""]
    with pytest.raises(InvalidRequestError, match="which has query, document, not 'x'"):
        prompts.prompt("x")


def test_the_default_prompt_is_that_of_unnamed_ones(tmp_path: Path) -> None:
    write(tmp_path, prompts={"query": QUERY, "document": "d"}, default_prompt_name="query")
    prompts = SentencePrompts.from_folder(tmp_path)
    assert [prompts.prompt(name) for name in (None, "document")] == [QUERY, "d"]


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"prompts": {"query": 3}}, r"prompts.query must be a text"),
        ({"prompts": {}, "default_prompt_name": "query"}, "default_prompt_name must be the name"),
        ({"prompts": {"a": "b"}, "default_prompt_name": 3}, "default_prompt_name must be the name"),
    ],
)
def test_invalid_prompts_are_named(values: dict[str, object], part: str, tmp_path: Path) -> None:
    write(tmp_path, **values)
    with pytest.raises(CheckpointError, match=part):
        SentencePrompts.from_folder(tmp_path)


def test_prompts_are_written_before_texts(tmp_path: Path) -> None:
    shutil.copytree(TINY_LLAMA, tmp_path, dirs_exist_ok=True)
    write(tmp_path, prompts={"query": QUERY, "document": "Text: "}, default_prompt_name="document")
    with LLM(
        tmp_path, device="cpu", executor="local", task="embed", num_threads=1, show_progress=False
    ) as llm:
        named = llm.embed(["import"], prompt_name="query")
        default = llm.embed(["import"])
        with pytest.raises(InvalidRequestError, match="cannot be used with token ids"):
            llm.embed([[5, 6]], prompt_name="query")
        ids = llm.embed([[5, 6]])
    (tmp_path / "config_sentence_transformers.json").unlink()
    with LLM(
        tmp_path, device="cpu", executor="local", task="embed", num_threads=1, show_progress=False
    ) as llm:
        assert named == llm.embed([f"{QUERY}import"])
        assert default == llm.embed(["Text: import"])
        assert ids == llm.embed([[5, 6]])
