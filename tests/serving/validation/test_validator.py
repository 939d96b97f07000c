"""The order of validation, and tokenizers that do not match the model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from cluster.serving.inputs import EmbeddingInput, GenerationInput
from cluster.serving.text.templates.chat_prompt import ChatMessage, ChatPrompt
from cluster.serving.text.text_pool import TextPool
from cluster.serving.validation.embedding_validator import EmbeddingValidator
from cluster.serving.validation.validator import Validator
from pagedray.config import SchedulerConfig
from pagedray.errors import ContextLengthError, InvalidRequestError, RequestError
from pagedray.structure import Structure
from tests.serving.conftest import engine_config

if TYPE_CHECKING:
    from collections.abc import Iterator

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
