"""Drafts of a head on a rank, against plain torch and transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace as replaced
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3Config,
)

from attention.gpu.metadata import GpuMetadataBuilder
from attention.kernels.triton import advance
from cluster.engine.engine_options import EngineOptions, engine_config
from pagedray.batch import (
    Decodes,
    SequencePlan,
    SequenceStart,
    StepMasks,
    StepOutput,
    StepPlan,
    pack_token_ids,
)
from pagedray.config import SpeculationConfig, StepLimits
from pagedray.errors import CheckpointError, StartupError
from pagedray.model_config import DraftHeadConfig
from pagedray.sampling_params import SamplingParams
from tests.attention.shared_backend import SharedBackend
from tests.workers.draft_reference import (
    Choose,
    drafts_of,
    load_reference,
    noisy_copy,
    random_draft_model,
    random_eagle3_folder,
    random_glm4_moe_folder,
    random_mimo_folder,
    random_qwen3_5_folder,
    speculators_folder,
    states_and_logits,
)
from workers.decoder_worker import DecoderWorker, check_groups
from workers.models.draft_head import DraftHead
from workers.models.families.drafters import read_draft_head, read_draft_model
from workers.models.families.registry import read_model_config
from workers.models.self_attention import attention_spec
from workers.parallel.group import SoloGroup
from workers.runner.device_drafting import DeviceDrafting
from workers.runner.model_runner import completed_plan
from workers.runner.pending_tokens import PendingTokens
from workers.sampling.noise import generator_start, noise, noise_keys

TARGET = Path(__file__).parents[3] / "examples" / "tiny-llama"
BLOCK_SIZE = 4
NUM_DRAFTS = 4
LAYER_IDS = (1, 2, 3)
GREEDY = SamplingParams(temperature=0.0, max_tokens=100)
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
WAYS = [
    pytest.param(False, id="host"),
    pytest.param(
        True,
        id="device",
        marks=pytest.mark.skipif(
            torch.cuda.is_available(), reason="kernels are interpreted without a GPU"
        ),
    ),
]


def fields_of(folder: Path) -> dict[str, Any]:  # Any: JSON
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def target_of(folder: Path) -> Path:
    """Return the target of a head: the model itself for an MTP layer."""
    fields = fields_of(folder)
    is_head = "eagle_config" in fields or "speculators_model_type" in fields
    return TARGET if is_head or is_draft_model(folder) else folder


def is_draft_model(folder: Path) -> bool:
    """Return whether the model in a folder has the tokenizer of the target."""
    return (folder / "tokenizer.json").exists()


@cache
def target(folder: Path) -> PreTrainedModel:
    is_mimo = fields_of(folder)["model_type"] == "mimo"
    kind = Qwen2ForCausalLM if is_mimo else AutoModelForCausalLM
    model: PreTrainedModel = kind.from_pretrained(folder, dtype=torch.float32)
    return model


def likeliest(logits: Tensor, position: int) -> int:
    del position
    return int(logits.argmax())


def drawn(seed: int, temperature: float) -> Choose:
    """Return a choice by scores with the noise of a request with this seed."""
    start = np.array([generator_start(seed, 0)], dtype=np.uint64)
    ids = torch.arange(3072)

    def choose(logits: Tensor, position: int) -> int:
        key = torch.from_numpy(noise_keys(start, np.array([position])))
        return int((logits / temperature + noise(key, ids)[0]).argmax())

    return choose


def expected_drafts(
    folder: Path, token_ids: list[int], choose: Choose = likeliest, number: int = NUM_DRAFTS
) -> list[int]:
    """Return the drafts that follow these tokens."""
    if is_draft_model(folder):
        return drafts_of_model(target(folder), token_ids, choose, number)
    model = target(target_of(folder))
    states, _ = states_and_logits(model, token_ids[:-1])
    return drafts_of(load_reference(folder, model), states, token_ids, number, choose)


def drafts_of_model(
    model: PreTrainedModel, token_ids: list[int], choose: Choose, number: int
) -> list[int]:
    """Return the tokens that a draft model chooses to follow these tokens."""
    known, vocab_size = list(token_ids), model.config.vocab_size
    for _ in range(number):
        _, logits = states_and_logits(model, [min(one, vocab_size - 1) for one in known])
        scores = torch.full((max(vocab_size, 3072),), -torch.inf)
        scores[:vocab_size] = logits[-1]
        known.append(choose(scores[:3072], len(known)))
    return known[len(token_ids) :]


def continued(folder: Path, token_ids: list[int], number: int) -> list[int]:
    """Return the likeliest tokens that follow these tokens."""
    known = list(token_ids)
    for _ in range(number):
        _, logits = states_and_logits(target(target_of(folder)), known)
        known.append(int(logits[-1].argmax()))
    return known[len(token_ids) :]


def original_folder(folder: Path) -> Path:
    return random_eagle3_folder(folder, TARGET, layer_ids=LAYER_IDS, draft_vocab_size=1000)


def changed(folder: Path, **fields: Any) -> Path:  # Any: JSON
    """Change fields of a head's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def with_tensors(folder: Path, **shapes: tuple[int, ...]) -> Path:
    """Add random tensors to a head."""
    path = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(1)
    added = {
        f"{name}.weight": 1 + torch.randn(shape, generator=generator) / 4
        for name, shape in shapes.items()
    }
    save_file(load_file(path) | added, path)
    return folder


class Rank:
    """A rank with a draft head, and the rows and blocks of its sequences."""

    def __init__(self, folder: Path | None, **options: Any) -> None:  # Any: options of any type
        """Without the folder of a head, the controller has the drafts."""
        model = TARGET if folder is None else target_of(folder)
        named = {"method": "mtp"} if model == folder else {"model": str(folder)}
        if folder is None:
            named = {"method": "ngram"}
        elif is_draft_model(folder):
            named["method"] = "draft_model"
        chosen: dict[str, Any] = {
            "dtype": "float32",
            "num_blocks": 160,
            "max_model_len": 64,
            "device": "cpu",
            "num_threads": 1,
        } | options
        config = engine_config(
            model,
            EngineOptions(
                num_cpu_blocks=0,
                block_size=BLOCK_SIZE,
                speculative_config={**named, "num_speculative_tokens": NUM_DRAFTS},
                **chosen,
            ),
        )
        self.worker = DecoderWorker(config, SoloGroup())
        self.worker.load_weights(lambda done, total: None)
        self.worker.available_cache(StepLimits(max_num_seqs=8, max_num_batched_tokens=64))
        self.worker.allocate_cache(160, 0)
        self.num_groups = len(self.worker._spec.group_windows)
        self.step = 0

    def launch(self, chunks: list[SequencePlan], num_drafts: int, **fields: Any) -> StepOutput:
        # Any: fields of a plan
        return self.send(StepPlan(0, chunks, num_drafts=num_drafts, **fields)).output()

    def send(self, plan: StepPlan) -> PendingTokens:
        """Launch the next step of a plan for one group of layers."""
        starts = [replaced(one, block_ids=self.in_groups(one.block_ids)) for one in plan.starts]
        blocks = self.in_groups(np.frombuffer(plan.decodes.new_block_ids, np.int32))
        decodes = replaced(plan.decodes, new_block_ids=np.array(blocks, np.int32).tobytes())
        plan = replaced(plan, step=self.step, starts=starts, decodes=decodes)
        self.step += 1
        return self.worker.launch(plan)

    def in_groups(self, blocks: Iterable[int]) -> list[int]:
        """Return a block in each group for each of the blocks."""
        number = self.num_groups
        return [int(block) * number + group for block in blocks for group in range(number)]

    def close(self) -> None:
        self.worker.close()


def start(
    row: int,
    tokens: list[int],
    blocks: list[int],
    sampling: SamplingParams = GREEDY,
    *,
    seed: int = 0,
) -> SequenceStart:
    return SequenceStart(row, pack_token_ids(tokens), len(tokens), blocks, sampling, seed, 0)


def drafts(output: StepOutput) -> list[list[int]]:
    """Return the drafts of each sequence of an output."""
    found: list[list[int]] = (
        np.frombuffer(output.draft_ids, np.int32).reshape(-1, NUM_DRAFTS).tolist()
    )
    return found


def norms(folder: Path) -> Path:
    """Write a head of the speculators format with norms in all places."""
    written = speculators_folder(original_folder(folder / "original"), folder, TARGET)
    changed(written, norm_before_residual=True, norm_before_fc=True, norm_output=True)
    return with_tensors(written, input_norm=(3 * 256,))


def own_embedding(folder: Path) -> Path:
    """Write a head with an embedding of its own, and without a map of tokens."""
    written = random_eagle3_folder(folder, TARGET, layer_ids=(0, 3), draft_vocab_size=3072)
    return with_tensors(written, embed_tokens=(3072, 256))


def qwen3_5_of_attention(folder: Path) -> Path:
    """Write a Qwen3.5 without recurrent layers."""
    return random_qwen3_5_folder(folder, ("full_attention",) * 3)


_DRAFT_MODEL: dict[str, Any] = {  # Any: fields of any type
    **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "vocab_size": 3072},
    **{"num_hidden_layers": 2, "max_position_embeddings": 32, "eos_token_id": 0},
}


def llama_of_equal_layers(folder: Path) -> Path:
    """Write a draft model with the KV heads of the target."""
    config = LlamaConfig(**_DRAFT_MODEL, num_key_value_heads=4, head_dim=64)
    return random_draft_model(folder, config, TARGET)


def qwen3_of_other_layers(folder: Path) -> Path:
    """Write a draft model with other KV heads than the target, and a larger vocabulary."""
    config = Qwen3Config(**_DRAFT_MODEL | {"vocab_size": 3080}, num_key_value_heads=2, head_dim=16)
    return random_draft_model(folder, config, TARGET)


def gemma_of_fewer_tokens(folder: Path) -> Path:
    """Write a draft model with one KV head, and a smaller vocabulary than the target."""
    config = GemmaConfig(**_DRAFT_MODEL | {"vocab_size": 2500}, num_key_value_heads=1, head_dim=32)
    return random_draft_model(folder, config, TARGET)


MODELS = [llama_of_equal_layers, qwen3_of_other_layers, gemma_of_fewer_tokens]


def on_device(rank: Rank) -> None:
    """Have a rank draft as on a GPU."""
    worker, runner = rank.worker, rank.worker._runner
    assert worker._drafter is not None
    assert runner is not None
    builder = SharedBackend.make_metadata_builder(worker._spec)
    assert isinstance(builder, GpuMetadataBuilder)
    runner._drafting = drafting = DeviceDrafting(
        worker._drafter,
        runner._cache.device_pool,
        forward_pass=runner.forward_pass,
        batch=runner._batch,
        sampler=runner._sampler,
        builder=builder,
        max_num_rows=8,
        max_num_tokens=64,
        max_num_drafts=NUM_DRAFTS,
    )
    with torch.inference_mode():
        drafting.warm_up()


HEADS = [
    *(original_folder, qwen3_5_of_attention, *MODELS),
    *(norms, own_embedding, random_mimo_folder, random_glm4_moe_folder),
]


@pytest.mark.parametrize(
    ("make", "is_on_device"),
    [
        *((make, False) for make in HEADS),
        *(pytest.param(make, True, marks=WAYS[1].marks) for make in HEADS[:3]),
        *(pytest.param(make, True, marks=[*WAYS[1].marks, pytest.mark.slow]) for make in HEADS[3:]),
    ],
)
def test_drafts_follow_prompts_and_chains(
    make: Callable[[Path], Path], is_on_device: bool, tmp_path: Path
) -> None:
    folder = make(tmp_path / "head")
    rank = Rank(folder)
    if is_on_device:
        on_device(rank)
    rng = np.random.default_rng(1)
    vocab_size = rank.worker._config.model.vocab_size
    prompts = [rng.integers(2, vocab_size, size).tolist() for size in (11, 5)]
    starts = [start(0, prompts[0], [5, 9, 2]), start(1, prompts[1], [7, 3])]
    output = rank.launch([SequencePlan(0, 0, 6, False)], NUM_DRAFTS, starts=starts)
    assert output.draft_ids == b""
    # Block 8 and 11 hold drafts alone.
    chunks = [SequencePlan(0, 6, 5, True), SequencePlan(1, 0, 5, True)]
    output = rank.launch(chunks, NUM_DRAFTS, decodes=Decodes.pack((), (), (0, 1), (8, 11)))
    known = [[*prompt, token] for prompt, token in zip(prompts, output.token_ids, strict=True)]
    assert drafts(output) == [expected_drafts(folder, tokens) for tokens in known]

    # The first sequence has two right drafts and a wrong one, the second has no draft.
    right = continued(folder, known[0], 3)
    chain = [right[0], right[1], (right[2] + 1) % vocab_size]
    output = rank.launch(
        [],
        NUM_DRAFTS,
        decodes=Decodes.pack(
            [1, 0, 0, 0, 0], [5, 11, 12, 13, 14], [0, 0, 1], [12, 13, 14], draft_ids=chain
        ),
    )
    assert output.token_ids[1:4] == right[:3]
    known[1].append(output.token_ids[0])
    known[0] += right[:3]
    assert drafts(output) == [expected_drafts(folder, known[1]), expected_drafts(folder, known[0])]

    # A plain step feeds the head, too.
    output = rank.launch([], 0, decodes=Decodes.pack([0, 1], [14, 6]))
    assert output.draft_ids == b""
    for tokens, token in zip(known, output.token_ids, strict=True):
        tokens.append(token)
    output = rank.launch([], NUM_DRAFTS, decodes=Decodes.pack([0, 1], [15, 7]))
    for tokens, token in zip(known, output.token_ids, strict=True):
        tokens.append(token)
    assert drafts(output) == [expected_drafts(folder, tokens) for tokens in known]
    rank.close()


@pytest.mark.parametrize("is_sampled", [False, True])
def test_only_keys_of_the_head_are_missing_without_feeding(
    is_sampled: bool, tmp_path: Path
) -> None:
    folder = original_folder(tmp_path / "head")
    pools, token_ids = [], []
    for feeds_head in (True, False):
        rank = Rank(folder)
        chunks = [SequencePlan(0, 0, 7, is_sampled)]
        starts = [start(0, [5, 9, 7, 3, 11, 6, 2], [4, 5])]
        output = rank.launch(chunks, 0, starts=starts, feeds_head=feeds_head)
        assert rank.worker._runner is not None
        pools.append(rank.worker._runner._cache.device_pool.clone())
        token_ids.append(output.token_ids)
        rank.close()
    fed, unfed = pools
    assert token_ids[0] == token_ids[1]
    assert (fed != unfed).any()
    assert not unfed[fed != unfed].any()


@pytest.mark.parametrize("is_on_device", WAYS)
@pytest.mark.parametrize("make", [original_folder, *MODELS[1:]])
def test_drafts_of_random_rows_have_the_noise_of_the_target(
    make: Callable[[Path], Path], is_on_device: bool, tmp_path: Path
) -> None:
    folder = make(tmp_path / "head")
    rank = Rank(folder)
    if is_on_device:
        on_device(rank)
    rng = np.random.default_rng(2)
    known = [rng.integers(2, 2000, 7).tolist() for _ in range(3)]
    temperatures, seeds = (0.7, 0.0, 1.2), (5, 6, -7)
    starts = [
        start(
            row,
            tokens,
            [4 * row, 4 * row + 1],
            SamplingParams(temperature=temperature, max_tokens=50, top_p=0.9),
            seed=seed,
        )
        for row, (tokens, temperature, seed) in enumerate(
            zip(known, temperatures, seeds, strict=True)
        )
    ]
    chooses = [drawn(5, 0.7), likeliest, drawn(-7, 1.2)]
    grown = Decodes.pack((), (), (0, 1, 2), (2, 6, 10))
    chunks = [SequencePlan(row, 0, 7, True) for row in range(3)]
    plans: list[dict[str, Any]] = [  # Any: fields of a plan
        {"chunks": chunks, "starts": starts, "decodes": grown},
        {"chunks": [], "decodes": Decodes.pack([0, 1, 2], [7, 7, 7], (0, 1, 2), (3, 7, 11))},
    ]
    for plan in plans:
        output = rank.launch(num_drafts=NUM_DRAFTS, **plan)
        for tokens, token in zip(known, output.token_ids, strict=True):
            tokens.append(token)
        assert drafts(output) == [
            expected_drafts(folder, tokens, choose)
            for tokens, choose in zip(known, chooses, strict=True)
        ]
    rank.close()


GPU = {
    "device": "cuda",
    "dtype": "bfloat16",
    "num_threads": None,
    "attention_backend": "torch_sdpa",
    "max_num_seqs": 16,
}


GPU_WAYS = [pytest.param(way, marks=[pytest.mark.gpu, NEEDS_GPU]) for way in ("gpu", "gpu eager")]


OVERLAPPED = [((0.7, 0.0), False), ((0.0, 0.0), False), ((1.0, 0.8), False), ((0.7, 0.0), True)]


@pytest.mark.parametrize(
    ("way", "temperatures", "is_model"),
    [
        *(("host", *case) for case in OVERLAPPED),
        pytest.param("device", *OVERLAPPED[0], marks=WAYS[1].marks),
        *(
            pytest.param("device", *case, marks=[*WAYS[1].marks, pytest.mark.slow])
            for case in OVERLAPPED[1:]
        ),
        *(
            pytest.param(way, *case, marks=[pytest.mark.gpu, NEEDS_GPU])
            for way in ("gpu", "gpu eager")
            for case in OVERLAPPED
        ),
    ],
)
def test_overlapped_plan_follows_the_tokens_of_the_step_before(
    temperatures: tuple[float, float],
    is_model: bool,
    way: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = TARGET.with_name("tiny-llama-eagle3")
    if is_model:
        folder = noisy_copy(tmp_path / "drafter", TARGET)
    options = GPU | {"enforce_eager": way == "gpu eager"} if way.startswith("gpu") else {}
    ranks = [Rank(folder, **options), Rank(folder, **options)]
    completed = []

    def note(*arguments: Any) -> StepPlan:  # Any: its arguments
        completed.append(completed_plan(*arguments))
        return completed[-1]

    monkeypatch.setattr("workers.runner.model_runner.completed_plan", note)
    for rank in ranks if way == "device" else ():
        on_device(rank)
    text = "Return the median (middle value) of numeric data. When the number of data points is"
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    prompts = [tokenizer.encode(one).ids for one in (text, text[20:])]
    samplings = [SamplingParams(temperature=one, max_tokens=50) for one in temperatures]
    blocks = [list(range(16)), list(range(16, 32))]
    starts = [start(row, prompts[row], blocks[row], samplings[row], seed=row) for row in range(2)]
    chunks = [SequencePlan(row, 0, len(tokens), True) for row, tokens in enumerate(prompts)]
    ordinary, overlapped = ranks
    first = StepPlan(0, chunks, starts, num_drafts=NUM_DRAFTS)
    output, _ = [rank.send(first).output() for rank in ranks]
    ends = [len(tokens) for tokens in prompts]
    # The first plan after the prompts has drafts that the controller has sent.
    rows, positions, draft_ids = chains_of(ends, drafts(output))
    plan = StepPlan(
        0, [], decodes=Decodes.pack(rows, positions, draft_ids=draft_ids), num_drafts=NUM_DRAFTS
    )
    pending, lengths = overlapped.send(plan), []
    for _ in range(6):
        output = ordinary.send(plan).output()
        sampled = np.array(output.token_ids).reshape(2, -1)
        is_right = sampled[:, :-1] == np.reshape(draft_ids, (2, -1))
        accepted = np.cumprod(is_right, axis=1).sum(axis=1).tolist()
        lengths += accepted
        # An overlapped plan has the positions that follow if all drafts are right.
        rows, positions, _ = chains_of([end + NUM_DRAFTS + 1 for end in ends], [])
        plan = StepPlan(
            0,
            [],
            decodes=Decodes.pack(rows, positions),
            num_drafts=NUM_DRAFTS,
            is_overlapped=True,
        )
        latest = overlapped.send(plan)
        found = pending.output()
        assert (found.token_ids, found.draft_ids) == (output.token_ids, output.draft_ids)
        pending = latest
        ends = [end + 1 + number for end, number in zip(ends, accepted, strict=True)]
        rows, positions, draft_ids = chains_of(ends, drafts(output))
        decodes = Decodes.pack(rows, positions, draft_ids=draft_ids)
        plan = StepPlan(0, [], decodes=decodes, num_drafts=NUM_DRAFTS)
    # Some chains were accepted whole, others not at all.
    assert {0, NUM_DRAFTS} <= set(lengths)
    assert len(completed) == (0 if way.startswith("gpu") else 6)
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("way", ["host", *GPU_WAYS])
@pytest.mark.parametrize("temperatures", [(0.0, 0.0), (0.7, 0.9)])
def test_overlapped_plan_has_the_drafts_that_it_brings(
    temperatures: tuple[float, float], way: str
) -> None:
    options = GPU | {"enforce_eager": way == "gpu eager"} if way.startswith("gpu") else {}
    ranks = [Rank(None, **options) for _ in range(3)]
    rng = np.random.default_rng(4)
    prompts = [rng.integers(2, 2000, size).tolist() for size in (9, 14)]
    samplings = [SamplingParams(temperature=one, max_tokens=50) for one in temperatures]
    blocks = [list(range(16)), list(range(16, 32))]
    starts = [start(row, prompts[row], blocks[row], samplings[row], seed=row) for row in range(2)]
    chunks = [SequencePlan(row, 0, len(tokens), True) for row, tokens in enumerate(prompts)]
    output, _, _ = [rank.send(StepPlan(0, chunks, starts)).output() for rank in ranks]
    ends = [len(tokens) for tokens in prompts]
    # All tokens, one by one.
    plain, ordinary, overlapped = ranks
    answers = [[token] for token in output.token_ids]
    for number in range(34):
        decodes = Decodes.pack([0, 1], [end + number for end in ends])
        output = plain.send(StepPlan(0, [], decodes=decodes)).output()
        for answer, token in zip(answers, output.token_ids, strict=True):
            answer.append(token)
    num_known, upper = [1, 1], [1, 1]
    pending: tuple[list[int], PendingTokens] | None = None
    for step in range(5):
        guesses = [
            answer[number : number + NUM_DRAFTS]
            for answer, number in zip(answers, upper, strict=True)
        ]
        if step == 1:
            # The next drafts of the row are wrong, too, as they follow a wrong draft.
            guesses[0][2] += 1
        outputs = []
        for rank, numbers in ((ordinary, num_known), (overlapped, upper)):
            positions = [end + number - 1 for end, number in zip(ends, numbers, strict=True)]
            rows, places, draft_ids = chains_of(positions, guesses)
            plan = StepPlan(
                0,
                [],
                decodes=Decodes.pack(rows, places, draft_ids=draft_ids),
                is_overlapped=rank is overlapped and step > 0,
            )
            outputs.append(rank.send(plan))
            if rank is ordinary:
                sampled = np.array(outputs[0].output().token_ids).reshape(2, -1)
        if pending is not None:
            assert pending[1].output().token_ids == pending[0]
        pending = sampled.reshape(-1).tolist(), outputs[1]
        is_right = sampled[:, :-1] == np.array(guesses)
        accepted = np.cumprod(is_right, axis=1).sum(axis=1).tolist()
        upper = [number + NUM_DRAFTS + 1 for number in num_known]
        num_known = [number + 1 + right for number, right in zip(num_known, accepted, strict=True)]
        if step == 1:
            assert accepted == [2, NUM_DRAFTS]
    for rank in ranks:
        rank.close()


def chains_of(
    positions: list[int], guesses: list[list[int]]
) -> tuple[list[int], list[int], list[int]]:
    """Return the rows, positions and drafts of the chains of all rows."""
    places = range(NUM_DRAFTS + 1)
    return (
        [row for row in range(len(positions)) for _ in places],
        [position + place for position in positions for place in places],
        [draft for drafts in guesses for draft in drafts],
    )


@pytest.mark.parametrize("make", [original_folder, llama_of_equal_layers])
def test_kernels_of_overlapped_plans_are_compiled_before_the_first_step(
    make: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(make(tmp_path / "drafter"))
    launched = list[str]()
    for name in ("shorten", "shorten_items"):
        monkeypatch.setattr(advance, name, lambda *_, name=name, **__: launched.append(name))
    assert rank.worker._runner is not None
    rank.worker._runner.warm_up(torch.float32)
    assert launched == ["shorten", "shorten_items"]
    rank.close()


def test_mtp_layer_drafts_behind_recurrent_layers(tmp_path: Path) -> None:
    types = ("linear_attention", "full_attention", "linear_attention")
    folder = random_qwen3_5_folder(tmp_path / "model", types)
    rank = Rank(folder)
    known = list(range(3, 12))
    output = rank.launch(
        [SequencePlan(0, 0, 9, True)], NUM_DRAFTS, starts=[start(0, known, [5, 9, 2, 4])]
    )
    for position in (9, 10, 11):
        known += output.token_ids
        assert drafts(output) == [expected_drafts(folder, known)]
        output = rank.launch([], NUM_DRAFTS, decodes=Decodes.pack([0], [position]))
    rank.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 5000}, "a vocabulary of 5000, but tiny-llama has 3072"),
        (
            {"hidden_size": 512, "num_attention_heads": 16},
            "a hidden size of 512, but tiny-llama has 256",
        ),
        ({"target_hidden_size": 128}, "a target_hidden_size of 128, but tiny-llama has 256"),
        ({"num_key_value_heads": 8}, "a number of KV heads of 8, but tiny-llama has 4"),
        ({"head_dim": 32}, "a head size of 32, but tiny-llama has 64"),
        ({"draft_vocab_size": 4000}, "draft_vocab_size must be at most 3072, not 4000"),
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1, not 2"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}},
            "reads the input of layer 4, but tiny-llama has 4 layers",
        ),
        ({"parallel_drafting": True}, "parallel_drafting is not supported"),
        ({"speculators_model_type": "dflash"}, "dflash is not a draft head that is supported"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM is not a draft head"),
    ],
)
def test_head_of_another_model_is_rejected(
    fields: dict[str, object], message: str, tmp_path: Path
) -> None:
    folder = changed(original_folder(tmp_path / "head"), **fields)
    config = read_model_config(TARGET)
    with pytest.raises(CheckpointError, match=message):
        read_draft_head(folder, config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LlamaConfig(**_DRAFT_MODEL), r"1 of 3072 token ids stand for other tokens than in tiny"),
        (
            LlamaConfig(**_DRAFT_MODEL | {"vocab_size": 4000}),
            "the draft model has a vocabulary of 4000, but tiny-llama has 3072",
        ),
        (
            MistralConfig(**_DRAFT_MODEL, sliding_window=16),
            "a draft model with sliding windows is not supported",
        ),
        (MptConfig(d_model=64, n_heads=4, n_layers=1, vocab_size=3072), "a draft model with ALiBi"),
    ],
)
def test_draft_model_of_another_kind_is_rejected(
    config: PretrainedConfig, message: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    fields = {"architectures": [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]}
    changed(tmp_path, **fields)
    if "token ids" in message:
        text = (TARGET / "tokenizer.json").read_text()
        vocabulary = json.loads(text)
        token = next(iter(vocabulary["model"]["vocab"]))
        vocabulary["model"]["vocab"]["another token"] = vocabulary["model"]["vocab"].pop(token)
        (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(CheckpointError, match=message):
        read_draft_model(tmp_path, read_model_config(TARGET))


def test_cache_has_room_for_the_layers_of_a_draft_model(tmp_path: Path) -> None:
    sizes = []
    for make in (llama_of_equal_layers, qwen3_of_other_layers):
        rank = Rank(make(tmp_path / make.__name__), num_blocks=None)
        size = rank.worker.available_cache(StepLimits(max_num_seqs=8, max_num_batched_tokens=64))
        sizes.append((size.block_bytes, len(size.groups)))
        rank.close()
    # Keys and values of float32, of 4 + 2 layers alike, or of a layer at a time.
    layer_bytes = 2 * BLOCK_SIZE * 4 * 64 * 4
    assert sizes == [(6 * layer_bytes, 1), (layer_bytes, 5)]


def test_gpus_reject_draft_models_of_several_groups(tmp_path: Path) -> None:
    config = LlamaConfig(
        **_DRAFT_MODEL | {"num_hidden_layers": 44}, num_key_value_heads=2, head_dim=16
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    target = read_model_config(TARGET)
    draft_model = replace(read_draft_model(tmp_path, target), cache_offset=4)
    spec = attention_spec(
        target, SoloGroup(), block_size=4, device=torch.device("cpu"), drafter=draft_model
    )
    with pytest.raises(StartupError, match=r"44 layers of the draft model .* need 3 groups"):
        check_groups(draft_model, spec.grouped())


def test_model_without_an_mtp_layer_is_rejected() -> None:
    options = EngineOptions(
        device="cpu", speculative_config={"method": "mtp", "num_speculative_tokens": 2}
    )
    with pytest.raises(StartupError, match="tiny-llama has no layer of multi-token prediction"):
        engine_config(TARGET, options)


def test_map_beyond_the_vocabulary_is_rejected(tmp_path: Path) -> None:
    folder = original_folder(tmp_path / "head")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["d2t"][-1] = 3000
    save_file(tensors, path)
    with pytest.raises(
        CheckpointError, match=r"d2t maps to tokens .* to 3999, but the vocabulary has 3072"
    ):
        Rank(folder)


def test_number_of_drafts_comes_from_the_checkpoint(tmp_path: Path) -> None:
    original = original_folder(tmp_path / "original")
    folder = speculators_folder(original, tmp_path / "head", TARGET)
    options = EngineOptions(device="cpu", speculative_config={"model": str(folder)})
    config = engine_config(TARGET, options)
    assert config.speculation == SpeculationConfig(method="eagle3", num_speculative_tokens=3)
    assert isinstance(config.drafter, DraftHeadConfig)
    assert config.drafter.tapped_layers == LAYER_IDS


def test_drafts_of_states_that_are_not_finite_are_tokens(tmp_path: Path) -> None:
    rank = Rank(original_folder(tmp_path / "head"))
    assert isinstance(rank.worker._drafter, DraftHead)
    taps = rank.worker._drafter._taps
    keep = taps.keep
    taps.keep = lambda layer, stream: keep(layer, stream * torch.nan)  # type: ignore[method-assign]  # spoils them
    output = rank.launch(
        [SequencePlan(0, 0, 3, True)], NUM_DRAFTS, starts=[start(0, [5, 6, 7], [1, 2])]
    )
    (found,) = drafts(output)
    assert all(0 <= token_id < 3072 for token_id in found)
    rank.close()


@pytest.mark.parametrize("is_on_device", WAYS)
def test_sequence_with_a_late_mask_has_no_effect_on_the_drafts_of_others(
    is_on_device: bool, tmp_path: Path
) -> None:
    folder = original_folder(tmp_path / "head")
    rank = Rank(folder)
    if is_on_device:
        on_device(rank)
    masked = replaced(start(0, [9, 4], [3]), mask_start=0)
    starts = [masked, start(1, [5, 6, 7], [1, 2])]
    chunks = [SequencePlan(0, 0, 2, True), SequencePlan(1, 0, 3, True)]
    pending = rank.send(StepPlan(0, chunks, num_drafts=NUM_DRAFTS, starts=starts))
    pending.take_masks(StepMasks(pending.step, bytes(-(-3072 // 32) * 4)))
    output = pending.output()
    assert output.token_ids[0] == -1
    assert drafts(output)[1] == expected_drafts(folder, [5, 6, 7, output.token_ids[1]])
    rank.close()
