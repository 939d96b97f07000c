"""One rank of a model that generates: its part of the model, its KV cache, its steps."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

import torch

from attention.gpu.metadata import GpuMetadataBuilder
from pagedray.config import LARGE_LIMITS, CacheSize, EngineConfig, KernelReport, StepLimits
from pagedray.errors import DeviceError, StartupError
from pagedray.machine import num_usable_cores
from pagedray.model_config import DraftHeadConfig, ModelConfig
from pagedray.rank_progress import PoolReport
from pagedray.rank_roofline import AttentionWork, DeviceSpeed, ExpertChoice, RankRoofline
from workers.layers.formats.fp8_weight import FP8
from workers.layers.linear_choice import make_linear_kernel, replaced_kernels
from workers.layers.weight import Placement
from workers.memory_profile import (
    GraphSizes,
    MemoryProfile,
    cache_size,
    free_host_bytes,
    graph_sizes,
    num_rows_with_states,
    num_staging,
)
from workers.models.decoder import Decoder
from workers.models.draft_head import Eagle3Head, MtpHead, RankDrafter, Taps
from workers.models.draft_model import DraftModel
from workers.models.self_attention import attention_spec
from workers.parallel.group import GroupBrokenError, ParallelGroup
from workers.runner.decode_graphs import ChainGraphs, DecodeGraphs
from workers.runner.disk_jobs import DiskJobs
from workers.runner.drafting import Drafting, HostDrafting
from workers.runner.forward_pass import ForwardPass, SampledAttention
from workers.runner.input_batch import InputBatch
from workers.runner.kv_cache import KVCache, make_host_pool
from workers.runner.model_runner import ModelRunner
from workers.runner.persistent_pool import PoolMapper
from workers.runner.piece_graphs import PieceGraphs
from workers.runner.step_graphs import CaptureSetup
from workers.runner.token_table import TokenTable
from workers.sampler import Sampler
from workers.weights.checkpoint import with_cache_format
from workers.weights.load_weights import load_weights, with_stored_experts, with_stored_head
from workers.worker import Worker, release_gpu_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from attention.abstract import AttentionSpec
    from pagedray.batch import StepPlan
    from pagedray.node_memory import MemoryAddress
    from workers.runner.host_pool import HostPool
    from workers.runner.pending_tokens import PendingTokens

__all__ = [
    "CompileMarker",
    "DecoderWorker",
    "attention_work",
    "check_groups",
    "measure_roofline",
    "product_speed",
]

logger = logging.getLogger(__name__)

_READ_BYTES = {"cpu": 2**28, "cuda": 2**29}
"""Number of bytes to read, which is more than caches hold."""
_MATRIX_SIZE = {"cpu": 1024, "cuda": 8192}
_WARM_UP_S = 0.05
_TRIAL_S = 0.02
_NUM_TRIALS = 10

_FOLDER = "pagedray"


class DecoderWorker(Worker):
    """One rank of a model that generates, with its KV cache."""

    def __init__(
        self,
        config: EngineConfig,
        group: ParallelGroup,
        device: torch.device | None = None,
        pool_address: MemoryAddress | None = None,
    ) -> None:
        """`pool_address` is of memory for the CPU pool that outlives this process."""
        config = _stored(config)
        super().__init__(config, group, device)
        drafter = _stored_drafter(config)
        spec = attention_spec(
            config.model,
            group,
            block_size=config.cache.block_size,
            device=self._device,
            max_seq_len=config.max_model_len,
            drafter=drafter.layer if isinstance(drafter, DraftHeadConfig) else drafter,
        )
        self._spec = spec.grouped()
        if isinstance(drafter, ModelConfig) and self._device.type == "cuda":
            check_groups(drafter, self._spec)
        self._backend = self._select_backend(self._spec)
        self._model: Decoder | None = Decoder(
            config.model, group, backend=self._backend, device=self._device
        )
        # Ranks of other GPUs may choose another limit, but they must all prepare for the same.
        limits = config.scheduler.limits(LARGE_LIMITS)
        self._model.prepare_steps(limits.max_num_batched_tokens)
        self._drafter: RankDrafter | None = None
        if drafter is not None:
            max_num_tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs)
            self._drafter = self._make_drafter(drafter, self._model, max_num_tokens)
        self._runner: ModelRunner | None = None
        self.host_pool: HostPool | None = None
        """The CPU pool, kept from epoch to epoch, since pinning takes long."""
        self._pool_address = pool_address
        self._pool_mapper: PoolMapper | None = None
        self.pool_report = PoolReport()
        """The report of `allocate_cache` on the CPU pool."""
        self.disk_jobs: DiskJobs | None = None
        """Reads and writes of the rank's file since `allocate_cache`, or None without a file."""
        self._is_warm = False
        self._idle_lock = threading.Lock()
        """Held while idle time is used, and during measurements, while nothing else may run."""

    def load_weights(self, report_progress: Callable[[int, int], None]) -> dict[str, str]:
        assert self._model is not None
        if self._pool_address is not None:
            self._pool_mapper = PoolMapper(self._config, self._pool_address, rank=self._group.rank)
        digests = load_weights(self._model, self._config, report_progress)
        if self._drafter is not None:
            config = replace(self._config, model=self._drafter.layers)
            of_drafter = load_weights(self._drafter, config, report_progress)
            digests |= {f"drafter: {name}": digest for name, digest in of_drafter.items()}
        return digests

    @property
    def default_limits(self) -> StepLimits:
        limits = super().default_limits
        if not self._spec.states:
            return limits
        # The weights are loaded.
        free_bytes = free_host_bytes(self._config)
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            free_bytes = int(free - (1.0 - self._config.cache.memory_fraction) * total)
        num_rows = num_rows_with_states(self._spec, limits.max_num_seqs, max(0, free_bytes))
        return replace(limits, max_num_seqs=num_rows)

    def available_cache(self, limits: StepLimits) -> CacheSize:
        self._config = self._config.with_limits(limits)
        self._check_disk_folder()
        return cache_size(
            self._config,
            self._spec,
            free_bytes=self._free_bytes,
            num_neighbors=self._group.num_neighbors,
        )

    def allocate_cache(self, num_blocks: int, num_cpu_blocks: int) -> KernelReport:
        # Left from an attempt that failed because memory was too small.
        self._close_jobs()
        self._group.progress.begin_captures()
        cache = self._make_cache(num_blocks, num_cpu_blocks)
        self._runner = self._make_runner(cache, self._graph_sizes)
        if self.host_pool is not None:
            self.pool_report = self.host_pool.take_report()
        folder = self._config.cache.disk_cache_folder
        if folder is not None and self.host_pool is not None:
            self.disk_jobs = DiskJobs(folder, self.host_pool.blocks)
        report = KernelReport(
            self._backend.get_name(),
            self._runner.forward_pass.attention_providers,
            replaced_kernels(self._device),
        )
        if self._group.rank == 0 and not self._is_warm:
            # The layers are the same on all ranks.
            logger.info("Attention: %s", report.attention)
            for sentence in self._runner.forward_pass.attention_provider_sentences:
                logger.info("Attention: %s", sentence)
        return report

    def warm_up(self) -> None:
        assert self._runner is not None
        # Kernels stay compiled when the rank joins another group.
        if self._device.type == "cuda" and not self._is_warm:
            self._runner.warm_up(self._spec.dtype)
        self._is_warm = True

    def capture_graphs(self, *, only_largest: bool = False) -> None:
        assert self._runner is not None
        self._runner.capture_graphs(only_largest=only_largest)

    def use_idle_time(self) -> bool:
        if not self._idle_lock.acquire(blocking=False):
            return False
        try:
            assert self._runner is not None
            # Several ranks would have to capture a graph between the same two steps.
            if self._group.size == 1 and self._runner.capture_next():
                return True
            return self.host_pool is not None and self.host_pool.pin_next()
        finally:
            self._idle_lock.release()

    def end_epoch(self) -> None:
        self._close_jobs()
        if self._device.type == "cuda":
            # Raises if the device has failed.
            torch.cuda.synchronize(self._device)
        # Captured graphs hold the group's collectives.
        self._runner = None
        if self._device.type == "cuda":
            release_gpu_memory()
        self._group.leave()

    def launch(self, plan: StepPlan) -> PendingTokens:
        assert self._runner is not None
        if plan.swap_outs or plan.evictions:
            # There may have been too little idle time.
            assert self.host_pool is not None
            self.host_pool.start_pinning()
        if self.disk_jobs is not None:
            self.disk_jobs.launch(plan)
        return self._runner.launch(plan)

    def measure_roofline(self) -> RankRoofline:
        """Measure the device, and return the work of steps on it.

        No step may run meanwhile. Raises DeviceError if too little memory is free.
        """
        assert self._model is not None
        with self._idle_lock:
            return measure_roofline(self._model, self._spec)

    def close(self) -> None:
        self._close_jobs()
        if self._device.type == "cuda":
            # Copies to the CPU pool may be under way.
            with suppress(RuntimeError):
                torch.cuda.synchronize(self._device)
        # A caller may keep a closed engine and open another engine, which needs the memory.
        self._runner = self._model = self._drafter = self.host_pool = None
        if self._device.type == "cuda":
            release_gpu_memory()
        self._group.close()

    def _make_cache(
        self, num_blocks: int, num_cpu_blocks: int, *, shares_states: bool = False
    ) -> KVCache:
        """Return both pools; a CPU pool is kept for later epochs. Raises DeviceError."""
        try:
            host_pool = make_host_pool(
                self._spec,
                num_cpu_blocks,
                self.host_pool,
                mapper=self._pool_mapper,
                note_unpinned=self._group.progress.note_unpinned,
            )
            staging = 0
            if num_cpu_blocks:
                self.host_pool = host_pool
                staging = num_staging(self._config, self._spec, num_blocks)
            return KVCache(
                self._backend,
                self._spec,
                num_blocks=num_blocks,
                host_pool=host_pool,
                num_staging=staging,
                num_states=self._config.num_states if self._spec.states else 0,
                shares_states=shares_states,
            )
        except (MemoryError, OSError, RuntimeError) as error:
            raise DeviceError(
                f"Could not allocate a KV cache of {num_blocks} blocks and a CPU cache of "
                f"{num_cpu_blocks}, of {self._spec.block_bytes} bytes each{self._states_text}; use "
                "a lower --num-blocks, --num-cpu-blocks or --max-num-seqs."
            ) from error

    @property
    def _num_spare_states(self) -> int:
        return self._config.num_states - self._config.max_num_seqs if self._spec.states else 0

    @property
    def _states_text(self) -> str:
        """What to add to the sizes of the pools, for models with states."""
        if not self._spec.states:
            return ""
        return (
            f", and {self._spec.state_blocks} blocks for each of {self._config.num_states} states "
            f"of {self._config.max_num_seqs} sequences"
        )

    def _make_rows(self) -> tuple[TokenTable, InputBatch, Sampler]:
        """Return the per-row state."""
        max_num_seqs, max_model_len = self._config.max_num_seqs, self._config.max_model_len
        try:
            table = TokenTable(
                max_num_rows=max_num_seqs,
                max_model_len=max_model_len,
                max_num_tokens=max(self._config.max_num_batched_tokens, max_num_seqs),
                device=self._device,
            )
            batch = InputBatch(
                table,
                max_num_rows=max_num_seqs,
                max_model_len=max_model_len,
                block_size=self._spec.block_size,
                replays_decodes=self._device.type == "cpu" and not self._spec.states,
                windows=self._spec.group_windows,
                has_states=bool(self._spec.states),
                num_spare_states=self._num_spare_states,
                has_head=self._drafter is not None and self._drafter.lag > 0,
                head_group=self._spec.cache_groups[-1],
                counts_refused=self._device.type == "cuda"
                and self._config.speculation is not None
                and self._drafter is None,
            )
            sampler = Sampler(
                max_num_rows=max_num_seqs,
                vocab_size=self._config.model.vocab_size,
                device=self._device,
            )
        except (MemoryError, RuntimeError) as error:
            raise DeviceError(
                f"Could not allocate the tokens and sampling states of {max_num_seqs} sequences "
                f"of up to {max_model_len} tokens; use a lower --max-num-seqs or --max-model-len."
            ) from error
        return table, batch, sampler

    def _make_runner(self, cache: KVCache, sizes: GraphSizes) -> ModelRunner:
        """Return the runner of steps on a cache, with graphs of these sizes, not captured yet."""
        table, batch, sampler = self._make_rows()
        forward_pass = self._make_forward_pass(cache, table, sizes)
        return ModelRunner(
            forward_pass=forward_pass,
            cache=cache,
            batch=batch,
            sampler=sampler,
            progress=self._group.progress,
            drafting=self._make_drafting(cache, forward_pass, batch, sampler, sizes),
        )

    def _make_drafter(
        self, config: DraftHeadConfig | ModelConfig, model: Decoder, max_num_tokens: int
    ) -> RankDrafter:
        """Return a drafter for the model and steps of so many tokens, without weights."""
        if isinstance(config, ModelConfig):
            decoder = Decoder(config, self._group, backend=self._backend, device=self._device)
            return DraftModel(decoder, vocab_size=model.config.vocab_size)
        taps = Taps(
            config.tapped_layers,
            max_num_tokens=max_num_tokens,
            hidden_size=model.config.hidden_size,
            dtype=self._spec.dtype,
            device=self._device,
        )
        model.tap_layers(taps)
        place = Placement(
            self._group, self._spec.dtype, self._device, config.layer.quantization, self._backend
        )
        if config.mtp is None:
            return Eagle3Head(config, place, embedding=model.embedding, taps=taps)
        return MtpHead(
            config,
            place,
            embedding=model.embedding,
            taps=taps,
            target_norm=model.last_norm,
            target_logits=model.logits,
        )

    def _make_drafting(
        self,
        cache: KVCache,
        forward_pass: ForwardPass,
        batch: InputBatch,
        sampler: Sampler,
        sizes: GraphSizes,
    ) -> Drafting | None:
        """Return the drafter on a cache, if there is one."""
        if self._drafter is None:
            return None
        builder = self._backend.make_metadata_builder(self._spec)
        drafter, pool = self._drafter, cache.device_pool
        if self._device.type == "cpu":
            return HostDrafting(
                drafter,
                pool,
                forward_pass=forward_pass,
                batch=batch,
                sampler=sampler,
                builder=builder,
            )
        assert isinstance(builder, GpuMetadataBuilder)
        # Imported here so that this module can be imported without Triton.
        from workers.runner.device_drafting import DeviceDrafting

        # Ranks would have to capture between the same two steps.
        has_graphs = sizes.decodes and self._group.size == 1
        assert self._config.speculation is not None
        return DeviceDrafting(
            drafter,
            pool,
            forward_pass=forward_pass,
            batch=batch,
            sampler=sampler,
            builder=builder,
            max_num_rows=self._config.max_num_seqs,
            max_num_tokens=self._config.max_num_batched_tokens,
            max_num_drafts=self._config.speculation.num_speculative_tokens,
            graphs=torch.cuda.graph_pool_handle() if has_graphs else None,
        )

    def _make_forward_pass(
        self, cache: KVCache, table: TokenTable, sizes: GraphSizes
    ) -> ForwardPass:
        assert self._model is not None
        model = self._config.model
        ends_recurrent = model.is_recurrent(model.num_layers - 1)
        builder = self._backend.make_metadata_builder(self._spec)
        decode_graphs = chain_graphs = piece_graphs = None
        if any(sizes):
            setup = CaptureSetup(
                model=self._model,
                kv_cache=cache.device_pool,
                table=table,
                pool=torch.cuda.graph_pool_handle(),
                progress=self._group.progress,
                is_alone=self._group.size == 1,
                states=cache.states,
                num_spare_states=self._num_spare_states,
                reader=None if self._drafter is None or self._drafter.lag else self._drafter,
            )
            if sizes.decodes:
                decode_graphs = DecodeGraphs(setup, sizes.decodes, self._backend, self._spec)
            if sizes.chains:
                chain_graphs = ChainGraphs(setup, [*sizes.chains], self._backend, self._spec)
            if sizes.pieces:
                piece_graphs = PieceGraphs(setup, sizes.pieces, builder)
        sampled_attention = None
        # The last tokens of sequences need no other token of the step, unless a state does.
        ends_early = not ends_recurrent and not self._model.finishes_all
        if self._device.type == "cuda" and ends_early:
            sampled_builder = self._backend.make_metadata_builder(self._spec)
            sampled_attention = SampledAttention(cache.device_pool, builder, sampled_builder)
        return ForwardPass(
            self._model,
            cache.device_pool,
            builder=builder,
            state=self._backend.get_state_cls()(self._spec),
            decode_graphs=decode_graphs,
            chain_graphs=chain_graphs,
            piece_graphs=piece_graphs,
            sampled_attention=sampled_attention,
            states=cache.states,
        )

    def _check_disk_folder(self) -> None:
        """Raise StartupError if no file can be made in the folder for blocks."""
        folder = self._config.cache.disk_cache_folder
        if folder is None:
            return
        try:
            TemporaryFile(dir=folder).close()
        except OSError as error:
            raise StartupError(
                f"Cannot create files in --disk-cache-folder {folder}: {error.strerror}."
            ) from error

    def _close_jobs(self) -> None:
        """End all background reads and writes of the CPU pool, before its blocks are reused."""
        if self.disk_jobs is not None:
            self.disk_jobs.close()
        self.disk_jobs = None

    def _free_bytes(self) -> int:
        """Return the bytes that the device pool may take."""
        if self._device.type == "cpu":
            return free_host_bytes(self._config)
        self._compile_kernels()
        profile = MemoryProfile(
            self._config,
            self._device,
            self._group.progress,
            lambda sizes: self._make_runner(self._make_cache(1, 0, shares_states=True), sizes),
        )
        return profile.free_bytes(self._graph_sizes)

    def _compile_kernels(self) -> None:
        """Compile the kernels of all graphs in parallel, unless an earlier start has done so."""
        marker = CompileMarker(self._config, self._device)
        if marker.exists:
            return
        cache = self._make_cache(1, 0, shares_states=True)
        runner = self._make_runner(cache, self._graph_sizes)
        num_threads = num_usable_cores() // self._config.parallel.tensor_parallel_size
        try:
            runner.compile_kernels(self._spec.dtype, max(1, num_threads))
        except GroupBrokenError:
            raise
        except Exception as error:
            # Other versions of Triton may have other hooks. Kernels then compile at first launch.
            logger.warning("Could not compile kernels in parallel: %s", error)
        else:
            marker.write()
        del runner
        release_gpu_memory()

    @property
    def _graph_sizes(self) -> GraphSizes:
        return graph_sizes(self._config, self._device, self._backend)


def _stored(config: EngineConfig) -> EngineConfig:
    """Return the configuration of a model as a rank stores and reads it."""
    return with_cache_format(with_stored_experts(with_stored_head(config)))


def _stored_drafter(config: EngineConfig) -> DraftHeadConfig | ModelConfig | None:
    """Return the drafter as a rank stores and reads it, if there is one."""
    head, offset = config.drafter, len(config.model.cached_layers or (0,))
    if head is None:
        return None
    if isinstance(head, ModelConfig):
        return replace(_stored(replace(config, model=head)).model, cache_offset=offset)
    layer = replace(head.layer, kv_cache_dtype=config.model.kv_cache_dtype, cache_offset=offset)
    if head.mtp is not None:
        # A rank may have the files of its model in a folder of its own.
        layer = replace(layer, folder=config.model.folder)
    return replace(head, layer=with_stored_experts(replace(config, model=layer)).model)


def check_groups(draft_model: ModelConfig, spec: AttentionSpec) -> None:
    """Raise StartupError unless the layers of a draft model have one table of blocks."""
    num_groups = len(set(spec.cache_groups[draft_model.cache_offset :]))
    if num_groups > 1:
        raise StartupError(
            f"The {draft_model.num_layers} layers of the draft model {draft_model.name} need "
            f"{num_groups} groups of KV blocks, but on a GPU, they must be one; use a draft model "
            "with the KV heads of the model."
        )


def measure_roofline(model: Decoder, spec: AttentionSpec) -> RankRoofline:
    """Measure the device of a model, which takes about a second.

    Raises DeviceError if there is too little memory.
    """
    body, sampled = model.body_work(), model.sampled_work()
    experts = model.config.experts
    has_fp8 = body.fp8_row_flop + sampled.fp8_row_flop > 0.0
    try:
        speed = DeviceSpeed(
            read_bytes_per_s=_read_speed(model.device),
            flop_per_s=product_speed(model.dtype, model.device),
            fp8_flop_per_s=product_speed(FP8, model.device) if has_fp8 else None,
        )
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            "Too little GPU memory is free to measure the device; use a lower --memory-fraction "
            "or --num-blocks."
        ) from error
    return RankRoofline(
        weights=body,
        sampled=sampled,
        attention=attention_work(spec, model.config.cache_indices),
        experts=None if experts is None else ExpertChoice(experts.num_experts, experts.num_chosen),
        speed=speed,
        state_bytes=spec.state_bytes,
    )


def attention_work(
    spec: AttentionSpec, cache_indices: Iterable[int | None]
) -> tuple[AttentionWork, ...]:
    """Return the costs of attention in the layers of each window.

    `cache_indices` has the entry of the spec that each layer of the model reads, or None.
    """
    token_bytes: dict[int | None, int] = defaultdict(int)
    pair_flop: dict[int | None, float] = defaultdict(float)
    for layer in (spec.layers[index] for index in cache_indices if index is not None):
        window = layer.sliding_window
        # Keys and values; and the scores of a query and the sum of the values.
        token_bytes[window] += 2 * layer.num_kv_heads * layer.head_size * spec.cache_dtype.itemsize
        pair_flop[window] += 2 * 2.0 * layer.num_heads * layer.head_size
    return tuple(
        AttentionWork(window=window, token_bytes=num_bytes, pair_flop=pair_flop[window])
        for window, num_bytes in token_bytes.items()
    )


def product_speed(dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOP a second of a large product of matrices, which may be in fp8."""
    size = _MATRIX_SIZE[device.type]
    # A GPU takes less power, and is faster, with constant numbers.
    rows = torch.randn(size, size, device=device).to(dtype)
    multiply = _fp8_product(rows) if dtype == FP8 else _dense_product(rows)
    return 2.0 * size**3 / _seconds(multiply, device)


def _dense_product(rows: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a product of as many and as long rows with a weight, in the best layout."""
    kernel = make_linear_kernel(*rows.shape, has_bias=False, dtype=rows.dtype, device=rows.device)
    kernel.weight.normal_()
    kernel.finalize()
    return lambda: kernel(rows)


def _fp8_product(rows: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return the same product in fp8."""
    scale = torch.ones(1, device=rows.device)
    return lambda: torch._scaled_mm(
        rows, rows.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _read_speed(device: torch.device) -> float:
    """Return the bytes of memory that the device reads in a second."""
    num_bytes = _READ_BYTES[device.type]
    source = torch.ones(num_bytes // 4, device=device)
    if device.type == "cpu":
        # Reading two arrays uses more of the bandwidth than reading a single array.
        first, second = source.chunk(2)
        return num_bytes / _seconds(lambda: torch.dot(first, second), device)
    # A copy, which reads and writes, uses more of the bandwidth of a GPU than a sum does.
    target = torch.empty_like(source)
    return 2 * num_bytes / _seconds(lambda: target.copy_(source), device)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the shortest time of a call, measured behind other calls of the same kind."""

    def run(num_calls: int) -> float:
        started_s = time.perf_counter()
        for _ in range(num_calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started_s

    run(1)
    num_warm_ups = max(1, math.ceil(_WARM_UP_S / run(1)))
    each_s = run(num_warm_ups) / num_warm_ups
    num_calls = max(1, math.ceil(_TRIAL_S / each_s))
    return min(run(num_calls) for _ in range(_NUM_TRIALS)) / num_calls


class CompileMarker:
    """A file in the folder where Triton keeps kernels, for each configuration and kind of GPU."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        # Triton is imported only where it compiles.
        import triton

        from attention.kernels.triton.kernel_launcher import fix_kernel_keys

        kinds = (config, torch.cuda.get_device_name(device), triton.__version__, fix_kernel_keys())
        digest = sha256(repr(kinds).encode()).hexdigest()
        self._path = Path(triton.knobs.cache.dir) / _FOLDER / digest[:32]

    @property
    def exists(self) -> bool:
        """Return whether a rank with this configuration has compiled its kernels."""
        try:
            return self._path.exists()
        except OSError:
            return False

    def write(self) -> None:
        """Record that the kernels are compiled. Otherwise, the next start checks each of them."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
        except OSError as error:
            logger.info("Could not note in %s that kernels are compiled: %s", self._path, error)
