"""vLLM's options that have another name here, no effect, or are rejected, and why."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from pagedray.sampling_params import MAX_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "ALIASES",
    "IGNORED",
    "IGNORED_SWITCHES",
    "REJECTED",
    "VLLM_NAMES",
    "WITHOUT_EFFECT",
    "has_no_effect",
]

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "distributed_executor_backend": "executor",
        "enable_prefix_caching": "enable_prefix_cache",
        "gpu_memory_utilization": "memory_fraction",
        "num_gpu_blocks_override": "num_blocks",
    }
)
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
_CONFIG = "edit config.json in the folder of the model"


def _by_option(options_of: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each option with its reason, from the options of each reason."""
    for reason, names in options_of.items():
        for name in names.split():
            yield name, reason


IGNORED_SWITCHES: Mapping[str, str] = MappingProxyType(
    dict(
        _by_option(
            {
                "a step is always planned while the previous one runs": "async_scheduling",
                "all_reduce selects how results are summed over GPUs": "disable_custom_all_reduce",
                _LOGGING: "disable_log_requests enable_log_requests enable_log_outputs "
                "enable_log_deltas",
                "statistics are exported as metrics": "disable_log_stats aggregate_engine_logging "
                "enable_logging_iteration_details",
                _METRICS: "cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics "
                "kv_cache_metrics ray_workers_use_nsight",
                _CHUNKS: "disable_chunked_mm_input disable_async_output_proc "
                "multi_step_stream_outputs",
                _EXPERTS: "enable_dbo enable_eplb",
                _KERNELS: "disable_cascade_attn disable_nccl_for_dp_synchronization "
                "enable_flashinfer_autotune",
                _LOADING: "use_tqdm_on_load",
                _MEDIA: "disable_mm_preprocessor_cache enable_mm_embeds interleave_mm_strings "
                "language_model_only mm_encoder_only skip_mm_profiling",
                _GRAMMAR: "guided_decoding_disable_fallback",
                "there is one KV cache manager": "disable_hybrid_kv_cache_manager "
                "use_v2_block_manager",
                "environment variables of vLLM are not read": "fail_on_environ_validation",
                "docs/models.md lists the supported formats": "allow_deprecated_quantization",
            }
        )
    )
)
"""Options that are true or false and cannot change a token, and why."""

IGNORED: Mapping[str, str] = MappingProxyType(
    {
        **IGNORED_SWITCHES,
        **dict(
            _by_option(
                {
                    "prefixes are kept in the CPU blocks": "kv_offloading_backend",
                    "num_cpu_blocks sets the blocks for prefixes": "kv_offloading_size",
                    "max_graph_tokens limits the graphs of prompts": "max_seq_len_to_capture",
                    "num_cpu_blocks sets the blocks for swapping and for prefixes": "swap_space",
                    "keys of prefixes are BLAKE2b digests": "prefix_caching_hash_algo",
                    "each output is sent when it is ready": "stream_interval",
                    "requests are ordered by priority, then arrival": "scheduling_policy",
                    "the preemption option selects it": "preemption_mode",
                    _CHUNKS: "long_prefill_token_threshold max_long_partial_prefills "
                    "max_num_partial_prefills num_scheduler_steps scheduler_delay_factor",
                    _METRICS: "collect_detailed_traces kv_cache_metrics_sample "
                    "show_hidden_metrics_for_version",
                    _EXPERTS: "all2all_backend dbo_decode_token_threshold "
                    "dbo_prefill_token_threshold eplb_config expert_placement_strategy "
                    "num_redundant_experts ubatch_size",
                    _KERNELS: "attention_config kernel_config moe_backend performance_mode",
                    _GRAPHS: "compilation_config cuda_graph_sizes cudagraph_capture_sizes "
                    "max_cudagraph_capture_size optimization_level",
                    _LOADING: "ignore_patterns max_parallel_loading_workers "
                    "model_loader_extra_config pt_load_map_location safetensors_load_strategy",
                    _MEDIA: "allowed_local_media_path allowed_media_domains media_io_kwargs "
                    "mm_encoder_attn_backend mm_encoder_tp_mode mm_processor_cache_gb "
                    "mm_processor_cache_type mm_processor_kwargs "
                    "mm_shm_cache_max_object_size_mb video_pruning_rate",
                    "no supported model has such layers": "mamba_block_size "
                    "mamba_cache_dtype "
                    "mamba_cache_mode "
                    "mamba_ssm_cache_dtype",
                    "long texts are tokenized in threads": "tokenizer_pool_extra_config "
                    "tokenizer_pool_size tokenizer_pool_type",
                    "the KV cache is not split along sequences": "cp_kv_cache_interleave_size "
                    "dcp_kv_cache_interleave_size",
                }
            )
        ),
    }
)
"""Options that cannot change a token, and why or what there is instead."""

WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "additional_config": (None, {}),
        "calculate_kv_scales": (None, False),
        "code_revision": (None,),
        "config_format": ("auto", "hf"),
        "convert": ("auto",),
        "cpu_offload_gb": (0,),
        "data_parallel_size": (1,),
        "data_parallel_size_local": (1,),
        "decode_context_parallel_size": (1,),
        "disable_sliding_window": (False,),
        "download_dir": (None,),
        "enable_chunked_prefill": (None, True),
        "enable_elastic_ep": (False,),
        "enable_lora": (None, False),
        "enable_prompt_embeds": (False,),
        "enable_return_routed_experts": (False,),
        "enable_sleep_mode": (False,),
        "guided_decoding_backend": ("auto", "xgrammar"),
        "guided_decoding_disable_any_whitespace": (False,),
        "guided_decoding_disable_additional_properties": (False,),
        "hf_config_path": (None,),
        "hf_overrides": (None, {}),
        "hf_token": (None,),
        "kv_sharing_fast_prefill": (False,),
        "logprobs_mode": ("raw_logprobs",),
        "model_impl": ("auto", "vllm"),
        "nnodes": (1,),
        "node_rank": (0,),
        "num_lookahead_slots": (0,),
        "override_generation_config": (None, {}),
        "override_pooler_config": (None,),
        "pipeline_parallel_size": (1,),
        "pooler_config": (None,),
        "prefill_context_parallel_size": (1,),
        "revision": (None,),
        "rope_scaling": (None, {}),
        "rope_theta": (None,),
        "runner": ("auto",),
        "skip_tokenizer_init": (False,),
        "speculative_config": (None,),
        "structured_outputs_config": (None, {}, {"backend": "auto"}, {"backend": "xgrammar"}),
        "tokenizer": (None,),
        "tokenizer_mode": ("auto",),
        "tokenizer_revision": (None,),
        "trust_remote_code": (False,),
    }
)
"""Options that we do not have, and their values without effect."""

REJECTED: Mapping[str, str] = MappingProxyType(
    dict(
        _by_option(
            {
                "use more ranks with tensor_parallel_size": "cpu_offload_gb cpu_offload_params "
                "offload_backend offload_group_size offload_num_in_group offload_params "
                "offload_prefetch_step",
                _REPLICAS: "data_parallel_address data_parallel_backend data_parallel_external_lb "
                "data_parallel_hybrid_lb data_parallel_rank data_parallel_rpc_port "
                "data_parallel_size data_parallel_size_local data_parallel_start_rank",
                _PARALLEL: "decode_context_parallel_size pipeline_parallel_size "
                "prefill_context_parallel_size",
                _NODES: "master_addr master_port nnodes node_rank",
                "the number of ranks is fixed": "enable_elastic_ep",
                "set HF_HOME": "download_dir",
                "set HF_TOKEN": "hf_token",
                "long prompts are always computed in chunks": "enable_chunked_prefill",
                _LORA: "default_mm_loras enable_lora enable_lora_bias "
                "enable_tower_connector_lora fully_sharded_loras lora_dtype "
                "lora_extra_vocab_size max_cpu_loras max_lora_rank max_loras "
                "specialize_active_lora",
                _CONFIG: "disable_sliding_window hf_config_path hf_overrides "
                "override_attention_dtype rope_scaling rope_theta",
                "only the Hugging Face format is supported": "config_format",
                "docs/models.md lists the supported model families": "model_impl",
                "write the revision after the model: ORG/NAME@REVISION": "revision",
                "code from a checkpoint is never run": "code_revision",
                "the server needs the model's tokenizer": "skip_tokenizer_init",
                "speculative decoding is not available": "num_lookahead_slots speculative_config",
                "the tokenizer is read from the folder of the model": "tokenizer",
                "the tokenizer is always the model's tokenizer.json": "tokenizer_mode",
                "the tokenizer is that of the revision of the model": "tokenizer_revision",
                "use task": "convert runner",
                "the pooling is read from modules.json in the folder of the model": (
                    "override_pooler_config pooler_config"
                ),
                "edit generation_config.json in the folder of the model": (
                    "override_generation_config"
                ),
                f"requests may ask for at most {MAX_LOGPROBS} log-probabilities of a token": (
                    "max_logprobs"
                ),
                "log-probabilities are always those of the raw logits": "logprobs_mode",
                _GRAMMAR: "guided_decoding_backend",
                f"{_GRAMMAR}, and reasoning_format is an option of its own": (
                    "structured_outputs_config"
                ),
                "there are at most one line feed and 32 spaces or tabs between two JSON tokens": (
                    "guided_decoding_disable_any_whitespace"
                ),
                "set additionalProperties in the schemas": (
                    "guided_decoding_disable_additional_properties"
                ),
                "the scales of keys and values are read from the checkpoint": "calculate_kv_scales",
                "use num_blocks": "kv_cache_memory_bytes",
                "all tokens of a prompt are computed by all layers": "kv_sharing_fast_prefill",
                _MEDIA: "limit_mm_per_prompt",
                "prompts must be texts or token ids": "enable_prompt_embeds",
                "responses do not contain the experts of tokens": "enable_return_routed_experts",
                "weights stay in memory": "enable_sleep_mode weight_transfer_config",
                _DISAGGREGATED: "ec_transfer_config kv_transfer_config",
                "events of KV blocks are not published": "kv_events_config",
                _PLUGINS: "io_processor_plugin logits_processor_pattern logits_processors "
                "scheduler_cls worker_cls worker_extension_cls",
                "its meaning depends on a plugin": "additional_config",
                "profile the processes of the ranks with py-spy or Nsight": "profiler_config",
            }
        )
    )
)
"""Why vLLM's options that have no equivalent are rejected, and what to use instead."""

VLLM_NAMES = frozenset((*ALIASES, *IGNORED, *WITHOUT_EFFECT, *REJECTED))
"""Options of vLLM that we do not have by these names."""


def has_no_effect(name: str, value: object) -> bool:
    """Return whether an option of vLLM is the same as none with this value."""
    if name == "limit_mm_per_prompt":
        return value is None or (isinstance(value, dict) and not any(value.values()))
    if name == "max_logprobs":
        return isinstance(value, int) and 0 <= value <= MAX_LOGPROBS
    return name in IGNORED or value in WITHOUT_EFFECT.get(name, ())
