"""Engine options under vLLM's names and values, for programs and commands written for it."""

from __future__ import annotations

import json
import logging
import os
import re
from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from cluster.engine.engine_options import EngineOptions
from pagedray.errors import StartupError
from pagedray.sampling_params import MAX_LOGPROBS
from pagedray.text import nearest_name, quote

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ALIASES",
    "IGNORED",
    "IGNORED_SWITCHES",
    "LISTS",
    "OVERRIDES",
    "REJECTED",
    "SPECULATION_HINT",
    "VLLM_NAMES",
    "WITHOUT_EFFECT",
    "checked_options",
    "engine_options",
    "ignored_reason",
    "is_our_behavior",
    "notice_level",
    "own_options",
    "own_value",
    "token_count",
]

logger = logging.getLogger(__name__)

_VALUES: Mapping[str, Mapping[object, object]] = {
    "attention_backend": {
        "FLASHINFER": "flashinfer",
        "TORCH_SDPA": "torch_sdpa",
        "XFORMERS": "xformers",
    },
    "device": {"auto": None},
    "task": {"auto": None, "none": None, "embedding": "embed"},
    "dtype": {
        "auto": None,
        "bf16": "bfloat16",
        "float": "float32",
        "fp16": "float16",
        "fp32": "float32",
        "half": "float16",
    },
    "kv_cache_dtype": {"fp8": "fp8_e4m3"},
    "load_format": dict.fromkeys(
        ("safetensors", "hf", "fastsafetensors", "instanttensor", "runai_streamer"), "auto"
    ),
    "quantization": {"awq_marlin": "awq", "gptq_marlin": "gptq"},
    "executor": {"mp": None, "uni": "local"},
}
"""vLLM's values of our options; None selects the default."""
_COUNTS = ("max_model_len", "max_num_batched_tokens")
_OBJECTS = ("hf_overrides", "override_generation_config", "speculative_config")
_LENGTH = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([kKmMgG]?)")
_UNITS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
ALIASES: Mapping[str, str] = {
    "convert": "task",
    "device_memory_utilization": "memory_fraction",
    "distributed_executor_backend": "executor",
    "enable_prefix_caching": "enable_prefix_cache",
    "gpu_memory_utilization": "memory_fraction",
    "max_num_queued_reqs": "max_queued_requests",
    "max_num_queued_tokens": "max_queued_tokens",
    "num_gpu_blocks_override": "num_blocks",
    "runner": "task",
}
"""vLLM's names of our options."""
_CHUNKS = "the size of prompt chunks follows max_num_batched_tokens and itl_target_ms"
_EXPERTS = "enable_expert_parallel selects between whole experts and columns of all experts"
_GRAPHS = "enforce_eager and max_graph_tokens control what runs as CUDA graphs"
_KERNELS = "kernels are selected for the GPU"
_LOADING = "each rank reads only its part of the weights"
_LOGGING = "the texts of requests are never logged"
_MEDIA = "requests with images, audio or video are rejected"
_METRICS = "measurements are in /metrics and in traces"
_LORA = "merge the adapter into the weights"
_REPLICAS = "use num_replicas of Ray Serve"
_PARALLEL = "use tensor_parallel_size"
_NODES = "start Ray on the nodes; placement_strategy PACK or SPREAD places ranks on several nodes"
_DISAGGREGATED = "prefill and decode run on the same ranks"
_PLUGINS = "third-party code is not loaded"
_GRAMMAR = "structures are always compiled by xgrammar"
_MODEL_CODE = "code from checkpoints is never run"
_LAYERS = "no supported model has such layers"
_SLEEP = "weights stay in memory"
_REPLACED = "ranks that die or do not respond are replaced"
_PREFIXES = "all full blocks of prefixes are cached, and the oldest are evicted first"
_PROCESSES = "scheduler and frontends run in threads of the server"
_HEADS = "heads of requests have fixed limits"
_FINGERPRINTS = "responses have no system_fingerprint"
_SPECULATION = "speculative_config says how tokens are guessed"
SPECULATION_HINT = "use speculative_config with method and num_speculative_tokens"
"""The alternative to options of SGLang and of earlier versions of vLLM."""
_CLIENT = "it is a flag of clients, such as pagedray chat"
_LOG_FORMAT = "use --log-format and --log-level"

Options = TypeVar("Options")


def engine_options(given: Mapping[str, object]) -> EngineOptions:
    """Return options by our names and values, or vLLM's.

    Raises StartupError for an unknown option or an invalid value.
    """
    return checked_options(own_options(given), EngineOptions, what="option", takes_text=False)


def own_options(given: Mapping[str, object]) -> dict[str, object]:
    """Return options by our names and values. Raises StartupError for an unknown option."""
    known = {field.name for field in fields(EngineOptions)}
    options: dict[str, object] = {}
    overrides: dict[str, dict[str, object]] = {}
    for name, value in given.items():
        own = ALIASES.get(name, name)
        if own in known:
            if own == "task" and options.get("task") in (None, "pooling"):
                options.pop("task", None)
            if own == "task" and "task" in options and own_value(own, value) in (None, "pooling"):
                continue
            if own in options:
                raise StartupError(f"{name} and another name of {own} cannot be used together.")
            options[own] = own_value(own, value)
            if own == "executor" and value == "mp":
                ranks = str(given.get("tensor_parallel_size") or 1)
                options[own] = "local" if ranks == "1" else "ray"
        elif name in OVERRIDES:
            whole, part = OVERRIDES[name]
            if value is not None:
                overrides.setdefault(whole, {})[part] = value
        elif reason := ignored_reason(name, value):
            logger.log(notice_level(name), "%s has no effect: %s.", name, reason)
        elif not is_our_behavior(name, value):
            raise StartupError(_rejection(name, known))
    for whole, parts in overrides.items():
        others = options.get(whole) or {}
        options[whole] = {**others, **parts} if isinstance(others, dict) else others
    return options


def own_value(name: str, value: object) -> object:
    """Return vLLM's value of one of our options as ours."""
    if name in _COUNTS:
        if isinstance(value, str):
            return token_count(value, name)
        return None if value == -1 else value
    if name in _OBJECTS and isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    if isinstance(value, str):
        return _VALUES.get(name, {}).get(value, value)
    return value


def token_count(text: str, name: str) -> int | None:
    """Return the number of tokens of 32768, 32K (32 * 1024) or 32k (32 * 1000); None for `auto`.

    Raises StartupError.
    """
    if text in ("auto", "-1"):
        return None
    found = _LENGTH.fullmatch(text)
    number = float(found[1]) * _UNITS[found[2]] if found else 0.5
    if not number.is_integer():
        raise StartupError(
            f"{name} must be a number of tokens such as 32768, 32K or auto, not {quote(text)}."
        )
    return int(number)


def notice_level(name: str) -> int:
    """Return the level at which the log says that an option has no effect."""
    # Users who set these expect more than speed.
    is_missed = name == "trust_remote_code" or name.startswith("spec")
    return logging.WARNING if is_missed else logging.INFO


def _rejection(name: str, known: set[str]) -> str:
    if name in REJECTED:
        return f"{name} is not supported: {REJECTED[name]}."
    if name.startswith("speculative_"):
        return f"{name} is not an option; {SPECULATION_HINT}."
    nearest = nearest_name(name, known | ALIASES.keys())
    return f"{name} is not an option{'.' if nearest is None else f'; did you mean {nearest}?'}"


def _by_option(options_of: Mapping[str, str]) -> Mapping[str, str]:
    """Return the reason of each option, from the options of each reason."""
    return {name: reason for reason, names in options_of.items() for name in names.split()}


def _each(names: str, values: tuple[object, ...]) -> Mapping[str, tuple[object, ...]]:
    """Return the same values for each of the options."""
    return dict.fromkeys(names.split(), values)


IGNORED_SWITCHES: Mapping[str, str] = _by_option(
    {
        "a step is always planned while the previous one runs": "async_scheduling",
        "all_reduce selects how results are summed over GPUs": "disable_custom_all_reduce",
        _LOGGING: "disable_log_requests enable_log_requests enable_log_outputs enable_log_deltas",
        "statistics are exported as metrics": "disable_log_stats aggregate_engine_logging "
        "enable_logging_iteration_details stats",
        _METRICS: "cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics "
        "enable_mm_processor_stats jit_monitor_verbose kv_cache_metrics ray_workers_use_nsight",
        _CHUNKS: "disable_chunked_mm_input disable_async_output_proc "
        "long_prefill_token_threshold_adaptive multi_step_stream_outputs "
        "scheduler_reserve_full_isl",
        _EXPERTS: "enable_dbo enable_eplb",
        _KERNELS: "disable_cascade_attn disable_nccl_for_dp_synchronization "
        "enable_batch_sharded_sampling enable_bf16x3_router_gemm enable_flashinfer_autotune "
        "enable_hc_sp monokernel use_fp64_gumbel",
        _LOADING: "enable_ep_weight_filter seed_listen seed_source use_tqdm_on_load",
        _MEDIA: "disable_mm_preprocessor_cache enable_mm_embeds enable_shm_tensor_arena "
        "interleave_mm_strings language_model_only mm_device_do_normalize mm_encoder_only "
        "skip_mm_profiling",
        _GRAMMAR: "guided_decoding_disable_fallback",
        _LAYERS: "enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint "
        "use_replayssm",
        _LORA: "enable_mixed_moe_lora_format enable_moe_shared_loras enable_tower_connector_lora "
        "fully_sharded_loras specialize_active_lora",
        _MODEL_CODE: "trust_remote_code",
        _PREFIXES: "swa_bounded_replay",
        _REPLACED: "enable_fault_tolerance",
        _SLEEP: "enable_cumem_allocator enable_nccl_comm_suspend sleep_mode_offload_cudagraph",
        "the KV cache is not split along sequences": "dcp_q_replicate",
        "the operating system places threads; numactl can bind the server": "numa_bind",
        "there is one KV cache manager": "disable_hybrid_kv_cache_manager use_v2_block_manager",
        "environment variables of vLLM are not read": "fail_on_environ_validation",
        "docs/models.md lists the supported formats": "allow_deprecated_quantization",
        "/docs only shows the API of the server": "disable_fastapi_docs",
        _PROCESSES: "disable_frontend_multiprocessing",
        "log_level warning omits the line of each call": "disable_uvicorn_access_log",
        "models may call tools whenever the request has tools": "enable_auto_tool_choice",
        "/docs does not need a network": "enable_offline_docs",
        "usage always includes them": "enable_prompt_tokens_details",
        "reasoning_format says how the model marks its reasoning": "enable_reasoning",
        "responses always return the X-Request-Id of the client": "enable_request_id_headers",
        "/load is always available": "enable_server_load_tracking",
        "certificates are reloaded when they change": "enable_ssl_refresh",
        "prompts never contain tools that may not be called": "exclude_tools_when_tool_choice_none",
        "the server always serves gRPC, on grpc_port": "grpc",
        "internal errors are always logged with their stack trace": "log_error_stack",
    }
)
"""Options that are true or false and cannot change a token, and why."""
IGNORED: Mapping[str, str] = {
    **IGNORED_SWITCHES,
    **_by_option(
        {
            "prefixes are kept in the CPU blocks": "kv_offloading_backend",
            "num_cpu_blocks sets the blocks for prefixes": "kv_offloading_size",
            "max_graph_tokens limits the graphs of prompts": "max_seq_len_to_capture",
            "max_num_seqs limits the running sequences": "max_num_active_seqs",
            "max_num_batched_tokens limits the tokens of a step": "max_num_scheduled_tokens",
            "num_cpu_blocks sets the blocks for swapping and for prefixes": "swap_space",
            "keys of prefixes are BLAKE2b digests": "prefix_caching_hash_algo",
            _PREFIXES: "prefix_cache_retention_interval prefix_match_unit",
            "each output is sent when it is ready": "stream_interval",
            "requests are ordered by priority, then arrival": "scheduling_policy",
            "the preemption option selects it": "preemption_mode",
            "the scheduler leaves room for the tokens of running sequences": "watermark",
            _CHUNKS: "long_prefill_token_threshold max_long_partial_prefills "
            "max_num_partial_prefills num_scheduler_steps scheduler_delay_factor",
            _METRICS: "collect_detailed_traces custom_histogram_buckets jit_monitor_mode "
            "kv_cache_metrics_sample show_hidden_metrics_for_version",
            _EXPERTS: "all2all_backend dbo_decode_token_threshold dbo_prefill_token_threshold "
            "eplb_config expert_placement_strategy num_redundant_experts ubatch_size",
            _KERNELS: "attention_config ir_op_priority kernel_config linear_backend moe_backend "
            "performance_mode sparse_indexer_topk_backend",
            _GRAPHS: "compilation_config cuda_graph_sizes cudagraph_capture_sizes "
            "max_cudagraph_capture_size optimization_level",
            _LOADING: "ignore_patterns max_parallel_loading_workers model_loader_extra_config "
            "pt_load_map_location safetensors_load_strategy safetensors_prefetch_block_size "
            "safetensors_prefetch_num_threads seed_listen_host seed_listen_port seed_source_host "
            "seed_source_port seed_token snapshot_dir weight_cache_draft_master_port "
            "weight_cache_health_host weight_cache_health_port weight_cache_master_port "
            "weight_cache_socket_dir",
            _MEDIA: "allowed_local_media_path allowed_media_domains ec_manager_config "
            "limit_mm_per_prompt media_io_kwargs mm_encoder_attn_backend mm_encoder_attn_dtype "
            "mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin "
            "mm_encoder_fp8_scale_save_path mm_encoder_tp_mode mm_hasher_algorithm "
            "mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type "
            "mm_processor_device mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc "
            "video_pruning_method video_pruning_rate",
            _LAYERS: "diffusion_config engram_config gdn_prefill_backend kda_decode_backend "
            "kda_prefill_backend mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode "
            "mamba_cache_philox_rounds mamba_config mamba_ssu_algorithm replayssm_buffer_len",
            _LORA: "lora_dtype lora_extra_vocab_size lora_target_modules max_cpu_loras "
            "max_lora_cls_labels max_lora_rank max_loras",
            _MODEL_CODE: "code_revision",
            _REPLACED: "cpu_distributed_timeout_seconds distributed_timeout_seconds "
            "fault_tolerance_config watchdog_config",
            _SLEEP: "sleep_mode_backend sleep_preserve_parameter_names",
            _SPECULATION: "num_lookahead_slots",
            "/metrics counts the guessed tokens of all requests": "per_request_spec_decode_metrics",
            "the operating system places threads; numactl can bind the server": "numa_bind_cpus "
            "numa_bind_nodes",
            "each replica plans its own steps": "dp_sync_interval prefill_schedule_interval",
            "long texts are tokenized in threads": "renderer_num_workers "
            "tokenizer_pool_extra_config tokenizer_pool_size tokenizer_pool_type",
            "the KV cache is not split along sequences": "cp_kv_cache_interleave_size "
            "dcp_comm_backend dcp_kv_cache_interleave_size",
            "one event loop runs all frontends": "api_server_count",
            "only requests to the model are logged": "disable_access_log_for_endpoints",
            _FINGERPRINTS: "fingerprint_mode fingerprint_value",
            _HEADS: "h11_max_header_count h11_max_incomplete_event_size",
            _LOGGING: "max_log_len",
            "log_level is the minimum level of all lines": "uvicorn_log_level",
            "streams of /v1/messages have a ping every 15 seconds, other streams none": (
                "sse_keep_alive_interval"
            ),
        }
    ),
}
"""Options that cannot change a token, with the reason or an alternative."""
WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    **_each(
        "additional_config aux_output_config default_chat_template_kwargs "
        "model_class_overrides quantization_config reasoning_config structured_outputs_config "
        "watermark_config",
        ({},),
    ),
    **_each(
        "allow_credentials calculate_kv_scales data_parallel_external_lb "
        "data_parallel_hybrid_lb data_parallel_multi_port_external_lb disable_sliding_window "
        "dry_run enable_elastic_ep enable_force_include_usage enable_lora enable_lora_bias "
        "enable_per_request_metrics enable_prompt_embeds enable_return_routed_experts "
        "enable_sleep_mode enable_tokenizer_info_endpoint enable_trace_replay "
        "guided_decoding_disable_additional_properties guided_decoding_disable_any_whitespace "
        "headless kv_sharing_fast_prefill omni quick return_sampling_mask "
        "return_tokens_as_token_ids skip_tokenizer_init tokens_only",
        (False,),
    ),
    **_each(
        "api_server_count data_parallel_size data_parallel_size_local "
        "decode_context_parallel_size elastic_ep_max_dp_size nnodes pipeline_parallel_size "
        "prefill_context_parallel_size stream_interval",
        (1,),
    ),
    **_each(
        "async_scheduling disable_log_requests enable_auto_tool_choice enable_chunked_prefill "
        "enable_fault_tolerance enable_prompt_tokens_details enable_reasoning "
        "enable_request_id_headers enable_server_load_tracking enable_ssl_refresh "
        "exclude_tools_when_tool_choice_none log_error_stack",
        (True,),
    ),
    **_each("cpu_offload_gb node_rank num_lookahead_slots ssl_cert_reqs", (0,)),
    "allowed_headers": (["*"],),
    "allowed_methods": (["*"],),
    "chat_template_content_format": ("auto", "openai", "string"),
    "config_format": ("auto", "hf"),
    "guided_decoding_backend": ("auto", "xgrammar"),
    "kv_cache_dtype_skip_layers": ([],),
    "logprobs_mode": ("raw_logprobs",),
    "model_impl": ("auto", "vllm"),
    "response_role": ("assistant",),
    "scheduling_policy": ("fcfs", "priority"),
    "tokenizer_mode": ("auto",),
}
"""Values without effect, since they ask for our behavior; None is such a value of every option."""
_STRUCTURE_DEFAULTS: Mapping[str, tuple[object, ...]] = {
    "backend": ("auto", "xgrammar"),
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False,),
    "disable_fallback": (False, True),
    "enable_in_reasoning": (False,),
    "reasoning_parser": ("",),
}
"""Values of the fields of `structured_outputs_config` that ask for our behavior."""
LISTS = frozenset(
    (
        *("allowed_media_domains", "collect_detailed_traces", "cpu_offload_params"),
        *("cuda_graph_sizes", "cudagraph_capture_sizes", "custom_histogram_buckets"),
        *("device_ids", "ignore_patterns", "kv_cache_dtype_skip_layers"),
        *("logits_processors", "lora_modules", "lora_target_modules"),
        *("numa_bind_cpus", "numa_bind_nodes", "offload_params"),
        *("sleep_preserve_parameter_names",),
    )
)
"""Options with several values."""
REJECTED: Mapping[str, str] = _by_option(
    {
        "use more ranks with tensor_parallel_size": "cpu_offload_gb cpu_offload_params "
        "offload_backend offload_group_size offload_num_in_group offload_params "
        "offload_prefetch_step",
        _REPLICAS: "data_parallel_address data_parallel_backend data_parallel_external_lb "
        "data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_rank "
        "data_parallel_rpc_port data_parallel_size data_parallel_size_local "
        "data_parallel_start_rank",
        _PARALLEL: "decode_context_parallel_size pipeline_parallel_size "
        "prefill_context_parallel_size",
        _NODES: "master_addr master_port nnodes node_rank",
        "the number of ranks is fixed": "elastic_ep_max_dp_size enable_elastic_ep",
        "set CUDA_VISIBLE_DEVICES": "device_ids",
        "set HF_TOKEN": "hf_token",
        "long prompts are always computed in chunks": "enable_chunked_prefill",
        _LORA: "default_mm_loras enable_lora enable_lora_bias lora_modules",
        "use max_model_len with the size of the window": "disable_sliding_window",
        "config.json is read from the folder of the model": "hf_config_path",
        "attention is computed in the data type of the model": "override_attention_dtype",
        "only the Hugging Face format is supported": "config_format",
        "docs/models.md lists the supported model families": "model_impl",
        "the server needs the model's tokenizer": "skip_tokenizer_init",
        "the tokenizer is always the model's tokenizer.json": "tokenizer_mode",
        "the pooling is read from modules.json in the folder of the model": (
            "override_pooler_config pooler_config"
        ),
        f"requests may ask for at most {MAX_LOGPROBS} log-probabilities of a token": "max_logprobs",
        "log-probabilities are always those of the raw logits": "logprobs_mode",
        _GRAMMAR: "guided_decoding_backend",
        f"{_GRAMMAR}, and reasoning_format is an option of its own": "structured_outputs_config",
        "there are at most one line feed and 32 spaces or tabs between two JSON tokens": (
            "guided_decoding_disable_any_whitespace"
        ),
        "set additionalProperties in the schemas": "guided_decoding_disable_additional_properties",
        "the scales of keys and values are read from the checkpoint": "calculate_kv_scales",
        "kv_cache_dtype is the data type of all layers": "kv_cache_dtype_skip_layers",
        "use num_blocks": "kv_cache_memory_bytes",
        "all tokens of a prompt are computed by all layers": "kv_sharing_fast_prefill",
        "only models that read and write text are supported": "omni",
        "prompts must be texts or token ids": "enable_prompt_embeds",
        "responses do not contain the experts of tokens": "enable_return_routed_experts",
        "responses do not contain the masks of sampling": "return_sampling_mask",
        "responses only contain text and log-probabilities": "aux_output_config",
        "recorded traces are not replayed": "enable_trace_replay",
        "generated text is not watermarked": "watermark_config",
        "use quantization": "quantization_config",
        SPECULATION_HINT: "ngram_prompt_lookup_max ngram_prompt_lookup_min num_speculative_tokens",
        "reasoning_format says how the model marks its reasoning": "reasoning_config",
        _SLEEP: "enable_sleep_mode weight_transfer_config",
        _DISAGGREGATED: "ec_transfer_config kv_transfer_config",
        "events of KV blocks are not published": "kv_events_config",
        _PLUGINS: "io_processor_plugin logits_processor_pattern logits_processors "
        "model_class_overrides scheduler_cls worker_cls worker_extension_cls",
        f"{_PLUGINS}; see reasoning_format": "reasoning_parser_plugin",
        f"{_PLUGINS}; see tool_call_format": "tool_parser_plugin",
        "its meaning depends on a plugin": "additional_config",
        "profile the processes of the ranks with py-spy or Nsight": "profiler_config",
        "clients send their API key in a header": "allow_credentials",
        "only the headers of the API are allowed": "allowed_headers",
        "only the methods of the API are allowed": "allowed_methods",
        "the form that the chat template reads is detected": "chat_template_content_format",
        "requests set chat_template_kwargs": "default_chat_template_kwargs",
        "requests set max_tokens": "max_tokens",
        "requests set return_tokens_as_token_ids": "return_tokens_as_token_ids",
        "requests set stream_options.include_usage": "enable_force_include_usage",
        "the log and the traces contain the times of each call": "enable_per_request_metrics",
        "/tokenizer_info is not available": "enable_tokenizer_info_endpoint",
        "a server always runs its own frontends": "headless",
        "pagedray deploy check and pagedray simulate start no server": "dry_run",
        _CLIENT: "model_name quick system_prompt url",
        _LOG_FORMAT: "log_config_file logging_config",
        "use a proxy in front of the server": "middleware",
        "use otlp_endpoint with the HTTP port of the collector": "otlp_traces_endpoint",
        "the role is always assistant": "response_role",
        "remove the prefix of the path in a proxy": "root_path",
        "use --tls-client-ca, which requires client certificates": "ssl_ca_certs",
        "--tls-client-ca requires certificates of clients": "ssl_cert_reqs",
        "the ciphers are OpenSSL's defaults for TLS 1.2 and 1.3": "ssl_ciphers",
        "all endpoints are always served": "tokens_only",
        "tools are run by the client": "tool_server",
        "use --host and --http-port": "uds",
    }
)
"""Why vLLM's options without an equivalent are rejected, with an alternative."""
OVERRIDES: Mapping[str, tuple[str, str]] = {
    "rope_scaling": ("hf_overrides", "rope_scaling"),
    "rope_theta": ("hf_overrides", "rope_theta"),
    "spec_method": ("speculative_config", "method"),
    "spec_model": ("speculative_config", "model"),
    "spec_tokens": ("speculative_config", "num_speculative_tokens"),
}
"""Options that are fields of others, with the names of both."""
VLLM_NAMES = frozenset((*ALIASES, *IGNORED, *OVERRIDES, *REJECTED))
"""Options of vLLM that we do not have by these names."""


def is_our_behavior(name: str, value: object) -> bool:
    """Return whether a value of a vLLM option asks for our behavior."""
    if value is None:
        return name in VLLM_NAMES
    if name == "max_logprobs":
        return isinstance(value, int) and 0 <= value <= MAX_LOGPROBS
    if name == "structured_outputs_config" and isinstance(value, dict):
        return all(one in _STRUCTURE_DEFAULTS.get(key, ()) for key, one in value.items())
    allowed = WITHOUT_EFFECT.get(name, ())
    if isinstance(value, bool):
        # In Python, 1 equals True.
        is_off = not value and name in IGNORED_SWITCHES and True not in allowed
        return is_off or any(one is value for one in allowed)
    return value in allowed


def ignored_reason(name: str, value: object) -> str | None:
    """Return why an option of vLLM has no effect, unless it asks for our behavior."""
    return None if is_our_behavior(name, value) else IGNORED.get(name)


def checked_options(
    given: Mapping[str, object], kind: type[Options], *, what: str, takes_text: bool
) -> Options:
    """Return an object of `kind`, a dataclass, with these fields.

    A field of None has its default. With `takes_text`, strings may hold numbers. Messages call a
    field `what`. Raises StartupError that names the invalid field.
    """
    chosen = {name: _plain(value) for name, value in given.items() if value is not None}
    try:
        return msgspec.convert(chosen, kind, strict=not takes_text)
    except msgspec.ValidationError as error:
        # Such as: Expected `int | null`, got `str` - at `$.num_blocks`
        text, _, path = str(error).partition(" - at `$.")
        if not path:
            raise StartupError(f"{text}.") from None
        name = path.rstrip("`").partition("[")[0]
        choices = _choices(kind, name)
        if choices:
            text = f"allowed are {', '.join(choices)}"
        shown = quote(chosen[name])
        raise StartupError(f"Invalid value {shown} of {what} {name}: {text}.") from None


def _plain(value: object) -> object:
    """Return a path as text."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _choices(kind: type, name: str) -> list[str]:
    """Return the values that a field may have, if its type lists them."""
    hint = get_type_hints(kind)[name]
    parts = (hint, *get_args(hint))
    return [str(one) for part in parts if get_origin(part) is Literal for one in get_args(part)]
