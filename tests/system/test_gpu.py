"""The engine on GPUs: transformers' greedy tokens, NCCL, and a model of realistic size."""

import json
import logging
import random
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from cluster.engine.engine_options import EngineOptions, engine_config
from pagedray import LLM, SamplingParams
from pagedray.batch import SequencePlan, SequenceStart, StepPlan, pack_token_ids
from tests.greedy import (
    LONGEST,
    Truth,
    check_all_at_once,
    check_cpu_prefixes,
    check_disk_prefixes,
    check_tiny_pool,
    checked_until_preempted,
    generated,
    settled_stats,
    truth_of,
)
from tests.small_models.checkpoints import CASES, Case, save_checkpoint, save_word_tokenizer
from tests.small_models.family_cases import GEMMA4_CASES, MOE_CASES
from tests.system.engines import serving_processes
from tests.workers.models.encoder_reference import TEXTS, VOCAB_SIZE, bert_reference, save_bert
from workers.decoder_worker import DecoderWorker
from workers.parallel.group import SoloGroup
from workers.weights.checkpoint import Checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
GPU_CASES = (
    *CASES,
    *(case for case in MOE_CASES if case.name in ("qwen3-moe", "gpt-oss-windows")),
    *GEMMA4_CASES,
)


def clamps_at_limit_of_model() -> bool:
    """Return whether the installed transformers read `swiglu_limit`; 5.17 do not."""
    config = GptOssConfig(hidden_size=8, intermediate_size=8, num_local_experts=1, swiglu_limit=1.5)
    return bool(GptOssExperts(config).limit == 1.5)


@pytest.fixture(scope="module", params=GPU_CASES, ids=lambda case: case.name)
def truth(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    case: Case = request.param
    if case.family == "GptOss" and not clamps_at_limit_of_model():
        pytest.skip("these transformers clamp the gates of every gpt-oss at 7")
    return truth_of(case, tmp_path_factory.mktemp(case.name))


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of Llama-3-8B's shape without weights."""
    folder = tmp_path_factory.mktemp("llama-3-8b")
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
    save_word_tokenizer(folder, 128256)
    return folder


@pytest.fixture(autouse=True)
def _float32_is_whole() -> None:
    # With TF32 a GEMM has the precision of float16, and tokens would differ.
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.fixture(autouse=True)
def _memory_is_released() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def gpu_llm(folder: Path, **options: Any) -> LLM:  # Any: engine options of any type
    options = {"executor": "local", "device": "cuda", "show_progress": False, **options}
    return LLM(folder, **options)


@pytest.mark.parametrize("block_size", [4, 16])
def test_batch_equals_transformers(truth: Truth, block_size: int) -> None:
    with gpu_llm(truth.folder, block_size=block_size) as llm:
        assert generated(llm, truth.prompts) == truth.continuations


def test_token_budget_that_forces_chunks_changes_nothing(truth: Truth) -> None:
    with gpu_llm(truth.folder, block_size=4, max_num_batched_tokens=13, max_num_seqs=4) as llm:
        assert generated(llm, truth.prompts) == truth.continuations


@pytest.mark.parametrize("max_num_batched_tokens", [13, 2048])
def test_steps_without_graphs_change_nothing(truth: Truth, max_num_batched_tokens: int) -> None:
    """The last layer attends for sampled tokens alone, of which chunks of a prompt have none."""
    options = {"max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": 4}
    with gpu_llm(truth.folder, block_size=4, max_graph_tokens=0, **options) as llm:
        assert generated(llm, truth.prompts) == truth.continuations
        # Then from the prefix cache.
        assert generated(llm, truth.prompts) == truth.continuations


def test_prefix_hit_changes_nothing(truth: Truth) -> None:
    with gpu_llm(truth.folder, block_size=4, num_blocks=512, max_num_seqs=1) as llm:
        assert generated(llm, truth.prompts) == truth.continuations
        assert generated(llm, truth.prompts) == truth.continuations
        assert llm.stats().scheduler.num_hit_tokens >= sum(
            (len(prompt) - 1) // 4 * 4 for prompt in truth.prompts
        )


@pytest.mark.parametrize("block_size", [4, 16])
def test_prefix_that_comes_back_from_the_cpu_pool_changes_nothing(
    truth: Truth, block_size: int
) -> None:
    check_cpu_prefixes(gpu_llm, truth, block_size=block_size)


def test_prefix_that_comes_back_from_the_disk_changes_nothing(truth: Truth, tmp_path: Path) -> None:
    check_disk_prefixes(gpu_llm, truth, folder=tmp_path)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("block_size", [4, 16])
def test_tiny_pool_changes_nothing(truth: Truth, block_size: int, preemption: str) -> None:
    check_tiny_pool(gpu_llm, truth, block_size=block_size, preemption=preemption)


def test_all_at_once_changes_nothing(truth: Truth) -> None:
    check_all_at_once(gpu_llm, truth)


def test_output_does_not_wait_for_the_step_behind_it(tmp_path: Path) -> None:
    save_checkpoint(CASES[0], tmp_path)
    worker = DecoderWorker(
        engine_config(tmp_path, EngineOptions(device="cuda", num_blocks=8, num_cpu_blocks=0)),
        SoloGroup(),
    )
    worker.load_weights(lambda done, total: None)
    worker.allocate_cache(8, 0)
    worker.capture_graphs()
    start = SequenceStart(
        0, pack_token_ids([1, 2, 3]), 3, [0], SamplingParams(temperature=0.0), 0, 0
    )
    first = worker.launch(StepPlan(0, [SequencePlan(0, 0, 3, is_sampled=True)], [start]))
    torch.cuda._sleep(400_000_000)
    second = worker.launch(StepPlan(1, [SequencePlan(0, 3, 1, is_sampled=True)]))
    assert len(first.output().token_ids) == 1
    assert not second.is_ready
    assert len(second.output().token_ids) == 1


def test_graphs_captured_by_steps_in_a_later_epoch_give_the_same_tokens(tmp_path: Path) -> None:
    save_checkpoint(CASES[0], tmp_path)
    options = EngineOptions(device="cuda", num_blocks=64, num_cpu_blocks=0, max_num_seqs=20)
    worker = DecoderWorker(engine_config(tmp_path, options), SoloGroup())
    worker.load_weights(lambda done, total: None)

    def tokens(num_rows: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0.0)
        starts = [
            SequenceStart(row, pack_token_ids([3 + row, 5, 7]), 3, [2 * row], sampling, row, 0)
            for row in range(num_rows)
        ]
        plans = [StepPlan(0, [SequencePlan(s.row, 0, 3, is_sampled=True) for s in starts], starts)]
        plans += (
            StepPlan(step, [SequencePlan(s.row, 2 + step, 1, is_sampled=True) for s in starts])
            for step in range(1, 8)
        )
        return [worker.launch(plan).output().token_ids for plan in plans]

    worker.allocate_cache(64, 0)
    worker.warm_up()
    worker.capture_graphs()
    expected = [tokens(size) for size in (3, 20, 7)]
    worker.end_epoch()
    free, _ = torch.cuda.mem_get_info()
    worker.allocate_cache(64, 0)
    worker.warm_up()
    worker.capture_graphs(only_largest=True)
    assert [tokens(size) for size in (3, 20, 7)] == expected
    worker.end_epoch()
    assert torch.cuda.mem_get_info()[0] >= free - 2**26


def test_weights_copied_through_pinned_memory_are_those_of_the_file(tmp_path: Path) -> None:
    save_checkpoint(CASES[0], tmp_path)
    options = EngineOptions(device="cuda", num_blocks=8, num_cpu_blocks=0)
    config = engine_config(tmp_path, options)
    worker = DecoderWorker(config, SoloGroup())
    assert worker._model is not None
    shards = list(worker._model.weight_shards())
    worker.load_weights(lambda done, total: None)
    with Checkpoint(tmp_path) as checkpoint:
        for shard in shards:
            stored = torch.cat(list(checkpoint.chunks(shard.name)))[shard.part]
            assert torch.equal(shard.target.cpu(), stored.to(shard.target.dtype))


@pytest.mark.parametrize("truth", [CASES[1]], indirect=True, ids=lambda case: case.name)
def test_ray_rank_that_runs_one_plan_ahead_changes_nothing(truth: Truth, ray_cluster: None) -> None:
    with gpu_llm(
        truth.folder,
        executor="ray",
        block_size=4,
        num_blocks=-(-LONGEST // 4) + 5,
        max_model_len=LONGEST,
        num_cpu_blocks=64,
        preemption="swap",
    ) as llm:
        for _ in range(5):
            checked_until_preempted(llm, truth, "num_swap_preemptions")


@pytest.mark.parametrize("truth", [CASES[0]], indirect=True, ids=lambda case: case.name)
@pytest.mark.parametrize(
    "num_ranks",
    [
        1,
        pytest.param(
            2,
            marks=[
                pytest.mark.multigpu,
                pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
            ],
        ),
    ],
)
def test_prefixes_outlive_a_rank(truth: Truth, ray_cluster: None, num_ranks: int) -> None:
    with gpu_llm(
        truth.folder,
        executor="ray",
        tensor_parallel_size=num_ranks,
        block_size=4,
        num_blocks=-(-LONGEST // 4) + 1,
        num_cpu_blocks=256,
        max_num_seqs=1,
        max_model_len=LONGEST,
        preemption="swap",
    ) as llm:
        assert generated(llm, truth.prompts) == truth.continuations
        settled_stats(llm)
        serving_processes()[-1].kill()
        assert generated(llm, truth.prompts) == truth.continuations
        stats = llm.stats().scheduler
        assert stats.num_kept_cpu_blocks > 0
        assert stats.num_kept_hit_tokens > 0


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(
    "truth", [CASES[0], CASES[1], CASES[4]], indirect=True, ids=lambda case: case.name
)
def test_two_ranks_change_nothing(truth: Truth, ray_cluster: None) -> None:
    with gpu_llm(
        truth.folder,
        executor="ray",
        tensor_parallel_size=2,
        block_size=4,
        num_blocks=-(-LONGEST // 4) + 5,
        max_model_len=LONGEST,
        num_cpu_blocks=64,
        max_num_batched_tokens=29,
        preemption="swap",
    ) as llm:
        assert generated(llm, truth.prompts) == truth.continuations
        # Prefix hits, also on blocks that were swapped.
        stats = checked_until_preempted(llm, truth, "num_swap_preemptions")
    assert stats.num_hit_tokens > 0
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(
    "truth",
    [case for case in GPU_CASES if case.name in ("gpt-oss-windows", "gemma4-two-shapes")],
    indirect=True,
    ids=lambda case: case.name,
)
def test_groups_of_layers_on_two_ranks_change_nothing(truth: Truth, ray_cluster: None) -> None:
    with gpu_llm(
        truth.folder, executor="ray", tensor_parallel_size=2, block_size=4, num_blocks=1024
    ) as llm:
        assert generated(llm, truth.prompts) == truth.continuations
        assert generated(llm, truth.prompts) == truth.continuations
        assert llm.stats().scheduler.num_hit_tokens > 0


def test_large_model_loads_and_generates(large_model: Path) -> None:
    run_large(large_model, memory_fraction=0.9)


def test_largest_steps_fit_when_the_cache_takes_all_memory(large_model: Path) -> None:
    with gpu_llm(large_model, load_format="dummy", memory_fraction=1.0) as llm:
        run_heavy(llm)
        show("cache takes all memory", memory())


def test_large_model_recovers_when_its_rank_dies(large_model: Path, ray_cluster: None) -> None:
    with gpu_llm(large_model, executor="ray", load_format="dummy") as llm:
        assert len(generated(llm, [[1, 2, 3]], 4)[0]) == 4
        serving_processes()[-1].kill()
        assert len(generated(llm, [[1, 2, 3]], 4)[0]) == 4


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_large_model_runs_on_two_ranks(large_model: Path, ray_cluster: None) -> None:
    run_large(large_model, executor="ray", tensor_parallel_size=2)


def run_large(folder: Path, **options: Any) -> None:  # Any: engine options of any type
    started_s = time.perf_counter()
    with gpu_llm(folder, load_format="dummy", **options) as llm:
        load_s = time.perf_counter() - started_s
        show(f"loaded in {load_s:.1f} s", f"{llm.stats().scheduler.num_blocks} blocks", memory())
        run_heavy(llm)
        show("after heavy steps", memory())
        for num_prompts in (1, 64):
            rate = measured_rate(llm, num_prompts)
            show(f"batch {num_prompts}: {rate:.1f} tokens/s, 128 -> 64 tokens each")


def run_heavy(llm: LLM) -> None:
    """Run more sequences than fit in a step, with every sampling feature."""
    generator = random.Random(0)
    prompts = [
        [generator.randrange(128256) for _ in range(length)] for length in [6000] + [90] * 299
    ]
    params = SamplingParams(
        top_p=0.9, repetition_penalty=1.1, logprobs=20, max_tokens=12, ignore_eos=True
    )
    generations = llm.generate(prompts, params, use_tqdm=False)
    assert all(len(generation.outputs[0].token_ids) == 12 for generation in generations)


def measured_rate(llm: LLM, num_prompts: int) -> float:
    """Return generated tokens per second; the time includes prompts of 128 tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    generator = random.Random(num_prompts)
    rates = []
    for _ in range(2):
        prompts = [[generator.randrange(128256) for _ in range(128)] for _ in range(num_prompts)]
        started_s = time.perf_counter()
        tokens = [
            token
            for generation in llm.generate(prompts, params, use_tqdm=False)
            for token in generation.outputs[0].token_ids
        ]
        rates.append(len(tokens) / (time.perf_counter() - started_s))
        assert len(tokens) == 64 * num_prompts
    return rates[-1]


def memory() -> str:
    free, total = torch.cuda.mem_get_info()
    num_retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free, {num_retries} retries so far"


def show(*parts: str) -> None:
    """Print the parts, which pytest -s shows."""
    print("|", *parts, sep="  ")


_NUM_LAYERS = 4
_LEFT_BYTES = 512 << 20
"""Memory that libraries keep, such as the workspace of GEMMs."""
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": _NUM_LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
PROVIDERS = {
    "flashinfer": {"prefill": "flashinfer", "prefill_ragged": "flashinfer", "decode": "flashinfer"},
    "xformers": {"prefill": "xformers", "prefill_ragged": "xformers", "decode": "xformers"},
    "torch_sdpa": {"prefill": "shared", "prefill_ragged": "torch", "decode": "shared"},
    "hybrid": {"prefill": "flashinfer", "prefill_ragged": "flashinfer", "decode": "shared"},
}
LIBRARIES = {"flashinfer": "flashinfer", "xformers": "xformers", "hybrid": "flashinfer"}


@pytest.fixture(params=PROVIDERS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    library = LIBRARIES.get(name)
    if library is not None and find_spec(library) is None:
        pytest.skip(f"needs {library}")
    return name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    save_word_tokenizer(tmp_path, 32000)
    return tmp_path


def opened(folder: Path, **options: Any) -> LLM:  # Any: engine options of any type
    return LLM(folder, executor="local", device="cuda", show_progress=False, **options)


def test_engine_logs_its_providers_once(
    folder: Path, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, logger="workers"),
        opened(
            folder, load_format="dummy", attention_backend=backend, max_num_seqs=4, num_blocks=600
        ) as llm,
    ):
        providers = llm.stats().kernels.providers
    assert providers == {part: {name: _NUM_LAYERS} for part, name in PROVIDERS[backend].items()}
    said = [line for line in caplog.messages if line.startswith("Attention:")]
    assert len(said) == len(set(said)) == len(set(PROVIDERS[backend].values()))


def test_closed_engine_releases_its_memory(folder: Path, backend: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    before = torch.cuda.memory_reserved()
    for _ in range(2):
        llm = opened(folder, load_format="dummy", attention_backend=backend, max_num_seqs=8)
        llm.generate([[7] * 100, [9] * 30], params, use_tqdm=False)
        assert torch.cuda.memory_reserved() - before > 2 << 30
        llm.close()
        # `llm` still refers to the closed engine.
        assert torch.cuda.memory_reserved() - before < _LEFT_BYTES


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_embeddings_equal_those_of_transformers(tmp_path: Path, backend: str, pooling: str) -> None:
    save_bert(tmp_path)
    words = {f"w{index}": index for index in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="w1 $A w2", special_tokens=[("w1", 1), ("w2", 2)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    # FlashInfer and xFormers support 16-bit types only.
    dtype = "float32" if backend == "torch_sdpa" else "bfloat16"
    limit = 1e-4 if dtype == "float32" else 2e-2
    take = {"mean": lambda h: h.mean(0), "cls": lambda h: h[0], "last": lambda h: h[-1]}
    expected = torch.stack([take[pooling](hidden) for hidden in bert_reference(tmp_path)])
    with opened(tmp_path, attention_backend=backend, dtype=dtype) as llm:
        vectors = llm.embed([text.tolist() for text in TEXTS], pooling=pooling, normalize=False)  # type: ignore[arg-type]  # the stubs are narrower than the library
    difference = (torch.tensor(vectors) - expected).norm(dim=1) / expected.norm(dim=1)
    assert difference.max() < limit
