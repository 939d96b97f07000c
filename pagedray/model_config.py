"""The configuration of a model, as its checkpoint gives it: frozen records.

Checkpoints are read in `workers.models.families.registry`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pagedray.errors import StartupError
from pagedray.weight_format import MXFP4_BLOCK_SIZE, CacheScales, Quantization, WeightFormat

__all__ = [
    "Activation",
    "ClampedGate",
    "DenseModule",
    "DraftHeadConfig",
    "Dtype",
    "ExpertsConfig",
    "HubFile",
    "HubRevision",
    "LayerEmbedding",
    "LayerHeads",
    "LongContext",
    "ModelConfig",
    "MtpLayer",
    "Multipliers",
    "NormKind",
    "RecurrentConfig",
    "RecurrentKind",
    "RopeConfig",
    "ScanNorm",
    "ScoreActivation",
    "Task",
    "TensorNames",
    "TextTensors",
]

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
"""The activation function of an MLP; `gelu_tanh` approximates `gelu`, `relu2` is squared."""
Dtype = Literal["float32", "bfloat16", "float16"]
NormKind = Literal["rms", "offset_rms", "layer"]
"""RMSNorm, RMSNorm that multiplies by one plus its weight, LayerNorm."""
RecurrentKind = Literal["short_conv", "delta_rule", "mamba2"]
ScanNorm = Literal["after_gate", "before_gate"]
ScoreActivation = Literal["sigmoid", "identity"]
ScoreHeadKind = Literal["roberta", "bert", "linear", "answer"]
Task = Literal["generate", "embed", "score"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embeddings (RoPE) and their scaling."""

    kind: Literal["default", "linear", "llama3", "longrope", "yarn"] = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    pair_factors: tuple[float, ...] = ()
    """The factor of each pair's wavelength, for longrope."""
    magnitude: float = 1.0
    """Multiplies rotated elements."""
    rotary_size: int | None = None
    """Number of leading elements of a head that are rotated; None is all."""
    num_rotated_pairs: int | None = None
    """Number of pairs that are rotated, of the pairs of whole heads; None is all."""
    is_interleaved: bool = False
    """Whether the elements of a pair are adjacent in a checkpoint, not half a head apart."""
    beta_fast: float = 32.0
    """Yarn keeps pairs that turn more often than this in the original context."""
    beta_slow: float = 1.0
    """Yarn divides by the factor pairs that turn less often than this."""
    is_range_rounded: bool = True
    """Whether yarn rounds the first and the last pair between these two."""
    query_growth: float = 0.0
    """Queries at `position` are multiplied by `1 + query_growth * log(1 + n)`, where n is
    `position // original_max_positions`."""


@dataclass(frozen=True, slots=True)
class LongContext:
    """How a model runs sequences that are longer than its first context length."""

    rope: RopeConfig
    """The RoPE of all positions, also of short sequences."""
    max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerHeads:
    """The keys and values of a layer, for models with layers that differ in them."""

    num_kv_heads: int
    head_size: int
    source: int | None = None
    """The earlier layer whose keys and values this layer reads; None if it has its own."""
    has_key_values: bool = False
    """Whether values come from the projection of keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEmbedding:
    """A second embedding of tokens, with a vector for each layer."""

    vocab_size: int
    size: int
    """The length of a layer's vector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """The names of a checkpoint's layers, without `.weight` and `.bias`.

    All but the first four are relative to their decoder layer.
    """

    embedding: str = "model.embed_tokens"
    embedding_norm: str | None = None
    """The norm after the embedding, or None."""
    decoder_layer: str = "model.layers.{}"
    """A format string with the layer's index."""
    final_norm: str = "model.norm"
    attention_norm: str | None = "input_layernorm"
    """The norm before attention, or None."""
    attention_post_norm: str | None = None
    """The norm after attention, or None."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Queries, keys and values, or the one fused tensor."""
    is_qkv_by_head: bool = False
    """Whether the fused tensor interleaves queries, keys and values by head."""
    qk_norms: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    attention_output: str = "self_attn.o_proj"
    sinks: str = "self_attn.sinks"
    """The tensor of attention sinks itself, not a layer."""
    recurrent: str = "linear_attn"
    """The prefix of the tensors of a recurrent layer."""
    mlp_norm: str | None = "post_attention_layernorm"
    """The norm before the MLP, or None."""
    mlp_post_norm: str | None = None
    """The norm after the MLP, or None."""
    mlp_input: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Gate and up projection, or the one tensor if they are fused or there is no gate."""
    mlp_output: str = "mlp.down_proj"
    layer_scale: str | None = None
    """The number by which the stream is multiplied after the layer, a tensor itself, or None."""
    side_mlp_norm: str | None = None
    """The norm after the MLP of a layer that also has experts, or None if layers have either."""
    side_expert_norm: str = ""
    """The norm before the experts beside an MLP."""
    side_expert_post_norm: str = ""
    """The norm after them."""
    router: str = "mlp.gate"
    router_bias: str = ""
    """The bias of the choice of experts, a tensor itself."""
    router_norm: str | None = None
    """The weight of the router's own norm of its input, a tensor itself, or None."""
    expert_scales: str | None = None
    """The factors of the weights of chosen experts, a tensor itself, or None."""
    expert_input: tuple[str, ...] = (
        "mlp.experts.{}.gate_proj.weight",
        "mlp.experts.{}.up_proj.weight",
    )
    """The tensors of gate and up projection of an expert, or the one tensor if they are fused or
    there is no gate.

    A name without a place for the expert's index is that of a stack of all experts."""
    expert_output: str = "mlp.experts.{}.down_proj.weight"
    expert_input_bias: str = ""
    """The stack of the biases of `expert_input`, with the same order of columns."""
    expert_output_bias: str = ""
    is_expert_input_interleaved: bool = False
    """Whether the columns of gate and up projection alternate in a fused tensor."""
    are_experts_transposed: bool = False
    """Whether stacks of experts are `[num_experts, in_size, out_size]`."""
    shared_input: tuple[str, ...] = ()
    """Like `mlp_input`, for the MLP that every token passes in addition to its experts."""
    shared_output: str = ""
    shared_gate: str = ""
    """The gate of that MLP."""
    latent: tuple[str, str] = ("", "")
    """The projections of rows before and behind experts."""
    encoder: str = "bert"
    """The prefix of all tensors of an encoder with a head; without a head they have none."""

    def expert_layers(self, prefix: str) -> list[str]:
        """Return the names of the linear layers of expert 0 in the decoder layer `prefix`."""
        tensors = (*self.expert_input, self.expert_output)
        return [f"{prefix}.{name}".format(0).removesuffix(".weight") for name in tensors]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedGate:
    """How an expert joins its gate and up projection, if not as `activation(gate) * up`.

    `gate * sigmoid(alpha * gate) * (up + 1)`, of a gate of at most `limit`, and of an up projection
    of at most that magnitude.
    """

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The experts of a layer: MLPs of which a router chooses some for each token."""

    num_experts: int
    num_chosen: int
    """Number of experts that the router chooses for each token."""
    intermediate_size: int
    """Intermediate size of each expert."""
    is_renormalized: bool
    """Whether the weights of a token's chosen experts add up to 1, or the weights of all experts.
    """
    gate: ClampedGate | None = None
    """How gate and up projection are combined; None is `activation(gate) * up`."""
    activation: Literal["silu", "gelu_tanh", "relu2"] = "silu"
    """The activation of gates without a `gate`; experts with `relu2` have no gate."""
    latent_size: int | None = None
    """The size of rows that experts read and write, between two projections; None is that of the
    stream."""
    num_groups: int = 1
    """Groups of experts, of which sigmoid scores choose some for each token."""
    num_chosen_groups: int = 1
    has_exact_router: bool = False
    """Whether the router computes in float32."""
    has_bias: bool = False
    """Whether the router and the projections of experts have biases."""
    is_mxfp4: bool = False
    """Whether the projections are stored as blocks of 32 4-bit numbers and their exponents."""
    dense_layers: tuple[int, ...] = ()
    """The layers that have one MLP instead of experts."""
    shared_size: int | None = None
    """Columns of the MLP that every token passes in addition to its experts, or None."""
    has_shared_gate: bool = False
    """Whether the output of that MLP is multiplied by the sigmoid of a product with the token."""
    num_stacked: int = 0
    """Experts that a rank stores that MLP as, behind all others; every token chooses them. 0 if the
    MLP is a layer of its own."""
    has_sigmoid_scores: bool = False
    """Whether scores are sigmoids of the router's logits, not a softmax over all experts."""
    has_choice_bias: bool = False
    """Whether a bias is added to sigmoid scores to choose experts, but not to their weights."""
    weight_scale: float = 1.0
    """Multiplies the weights of chosen experts by sigmoid scores."""
    sum_eps: float = 0.0
    """Added to the sum of sigmoid scores that weights are divided by."""
    is_expert_parallel: bool = False
    """Whether a rank has whole experts, instead of some columns of each."""

    @property
    def num_inputs(self) -> int:
        """The projections that read an expert's input: gate and up projection, or the latter."""
        return 1 if self.activation == "relu2" else 2

    def column_step(self, format: WeightFormat | None) -> int:
        """Return a number of columns, of which the part of a rank is a multiple.

        `format` is that of the projections, or None for plain weights and mxfp4.
        """
        if self.is_mxfp4:
            return MXFP4_BLOCK_SIZE
        return 1 if format is None else format.in_step


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentConfig:
    """The layers that have a recurrent state for each sequence, in place of keys and values.

    All have a causal convolution, and all but short convolutions also a matrix for each head.
    """

    kind: RecurrentKind
    layers: tuple[int, ...]
    """The layers, ascending."""
    conv_width: int
    """Tokens that the convolution reads, the current token included."""
    has_conv_bias: bool = False
    has_bias: bool = False
    """Whether the input projection has biases."""
    has_output_bias: bool = False
    num_key_heads: int = 0
    """Number of heads of queries and keys, of which adjacent heads of values share one."""
    num_value_heads: int = 0
    key_size: int = 0
    value_size: int = 0
    is_fused_by_head: bool = False
    """Whether a checkpoint has one tensor of all projections, grouped by key heads."""
    matrix_dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the matrices."""
    scan_norm: ScanNorm | None = "after_gate"
    """The norm of the results of a selective scan, relative to their gate; None is no norm."""
    is_beside_attention: bool = False
    """Whether these layers have attention too, which reads the same rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """Factors of inputs and outputs of linear layers, as in muP; weights are loaded with them."""

    attention_input: float = 1.0
    attention_output: float = 1.0
    recurrent_input: float = 1.0
    recurrent_output: float = 1.0
    recurrent_columns: tuple[float, ...] = (1.0,) * 5
    """Of the gate, the inputs, B, C and the step sizes of a selective scan."""
    mlp_gate: float = 1.0
    """Of the gate of an MLP before its activation."""
    mlp_output: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpLayer:
    """The names of a layer of multi-token prediction (MTP) in a checkpoint, and its inputs.

    DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024.
    """

    decoder_layer: str
    """Prefix of the layer, for its index, as in `TensorNames`."""
    token_norm: str
    """The norm of embeddings."""
    state_norm: str
    """The norm of states."""
    projection: str
    """Maps both to the input of the layer."""
    last_norm: str
    puts_state_first: bool = False
    """Whether the state precedes the embedding in the input of the projection."""
    reads_normed: bool = True
    """Whether states of the target are behind its last norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseModule:
    """A linear layer that follows the pooling of a sentence-transformers checkpoint."""

    folder: str
    """The name of its folder in that of the checkpoint."""
    in_size: int
    out_size: int
    has_bias: bool
    activation: Literal["identity", "tanh"]
    """Activation of the output."""


@dataclass(frozen=True, slots=True)
class TextTensors:
    """Where a checkpoint keeps the tensors of its text model, and which others it has."""

    prefixes: tuple[tuple[str, str], ...]
    """Prefixes of stored names, each with its replacement in the names of `TensorNames`."""
    skipped: tuple[str, ...]
    """Prefixes of tensors that are not loaded, such as those of other modalities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """A file of a model on the Hub."""

    name: str
    """The path of the file in the repository."""
    size: int | None
    """Bytes, if the Hub says how many."""
    sha256: str | None = None
    """The digest of the file in hexadecimal, which the Hub has for large files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRevision:
    """A model on the Hub at one commit, which every rank loads."""

    id: str
    """The id of the model, such as `Qwen/Qwen3-0.6B`."""
    commit: str
    files: tuple[HubFile, ...]
    """All files of the repository."""
    cache: Path | None = None
    """Folder of the cache on each node; None is the folder that the environment names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The architecture of a model, independent of its family."""

    name: str
    """The model name in the API."""
    other_names: tuple[str, ...] = ()
    """Further names that clients may give."""
    folder: Path
    """The checkpoint's folder; that of a model on the Hub is where this process found it."""
    hub: HubRevision | None = None
    """The model on the Hub from which each node loads weights; None loads them from the folder."""
    gguf: str | None = None
    """The path of the GGUF file of which each node makes the folder, or the file's name on the
    Hub."""
    architecture: str = ""
    """The entry of `architectures` in `config.json`, such as `LlamaForCausalLM`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_positions: int
    names: TensorNames = field(default_factory=TensorNames)
    stacked_names: TensorNames | None = None
    """Tensor names if the checkpoint has stacks of experts, where it may have them.

    Transformers 5 saves stacks with `save_original_format=False`.
    """
    text_tensors: TextTensors | None = None
    """How tensors are stored; None is by `names`, without other tensors."""
    mtp: MtpLayer | None = None
    """The layer of the checkpoint that can draft tokens, or None."""
    norm_kind: NormKind = "rms"
    norm_eps: float = 1e-6
    has_norm_bias: bool = False
    embedding_scale: float = 1.0
    """Multiplies embeddings, after rounding to their dtype."""
    has_tied_embeddings: bool = False
    logit_soft_cap: float | None = None
    """Logits become `cap * tanh(logit / cap)`, unless None."""
    logit_scale: float = 1.0
    """Multiplies logits."""
    residual_scale: float = 1.0
    """Multiplies the outputs of attention and MLP before they are added to the residual stream."""
    has_parallel_mlp: bool = False
    """Whether attention and MLP of a layer have the same input."""
    rope: RopeConfig | None = field(default_factory=RopeConfig)
    """The rotary position embeddings; None if the model has none."""
    window_rope: RopeConfig | None = None
    """RoPE of layers with a sliding window; None is the same as in other layers."""
    rotated_layers: tuple[bool, ...] = ()
    """Whether each layer has RoPE; empty is all."""
    long_context: LongContext | None = None
    """Replacement of the RoPE if the engine runs longer sequences, or None."""
    alibi_slopes: tuple[float, ...] | None = None
    """ALiBi slopes by head, or None."""
    attention_scale: float | None = None
    """Multiplies scores; None is `head_size ** -0.5`."""
    attention_soft_cap: float | None = None
    """Scores become `cap * tanh(score / cap)`, unless None."""
    has_sinks: bool = False
    """Whether each query head has a sink: a score that counts in the softmax and has no value."""
    qkv_limit: float | None = None
    """Queries, keys and values are clamped to this magnitude, unless None."""
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_qk_norm: bool = False
    has_value_norm: bool = False
    """Whether the values of each head are normed too, without a weight; only with `has_qk_norm`."""
    is_qk_norm_whole: bool = False
    """Whether the norm is over all heads of queries, and all of keys, instead of one head."""
    sliding_windows: tuple[int | None, ...] = ()
    """Keys that a query attends to, itself included, by layer; None is all."""
    layer_heads: tuple[LayerHeads, ...] = ()
    """Keys and values of each layer; empty if layers are alike."""
    has_attention_gate: bool = False
    """Whether the outputs of attention are multiplied by the sigmoid of a gate; the projection of
    queries has the gate of each head behind its query."""
    recurrent: RecurrentConfig | None = None
    """The layers that are recurrent, or None."""
    multipliers: Multipliers = field(default_factory=Multipliers)
    layer_embedding: LayerEmbedding | None = None
    """The embedding of tokens by layer, or None."""
    layer_places: tuple[tuple[int, int | None], ...] = ()
    """The indices of mixer and MLP of each layer in the names of tensors, the second None for a
    layer without an MLP; empty if layers have both, and their own index."""
    mlp_sizes: tuple[int, ...] = ()
    """`intermediate_size` of each layer; empty if layers are alike."""
    activation: Activation = "silu"
    is_mlp_gated: bool = True
    has_mlp_bias: bool = False
    experts: ExpertsConfig | None = None
    """Experts of layers, in place of an MLP or beside it (`side_mlp_norm`), or None."""
    is_encoder: bool = False
    """Whether tokens attend to all others of their text, as in BERT."""
    is_bidirectional: bool = False
    """Whether tokens of a decoder attend to all others of their text; it only embeds."""
    dense_modules: tuple[DenseModule, ...] = ()
    """Layers applied to pooled vectors, in this order."""
    task: Task = "generate"
    """Use of the model; an encoder embeds, or scores if it has a head for scores."""
    score_activation: ScoreActivation = "sigmoid"
    """Activation of scores."""
    score_head: ScoreHeadKind = "roberta"
    """How a score comes from hidden states: by the head of a RoBERTa or a BERT, by one linear
    layer, or by the logits of two tokens that answer a question."""
    answer_token_ids: tuple[int, int] = (0, 0)
    """The tokens of the answers no and yes."""
    num_token_types: int = 0
    """Size of an encoder's table of token types; a decoder has none."""
    position_padding_id: int | None = None
    """The padding token of a RoBERTa: positions count from the row after its id, and the padding
    token has none. None is a model with positions from 0.
    """
    dtype: Dtype = "bfloat16"
    """The dtype of weights and activations."""
    quantization: Quantization | None = None
    """How weights are stored that are not of this dtype, or None."""
    kv_cache_dtype: str = "auto"
    """The element type of the KV cache; "auto" is `dtype`."""
    cache_scales: tuple[CacheScales, ...] = ()
    """The scales of each layer for an fp8 cache, or none."""
    cache_offset: int = 0
    """Layers of the KV cache before those of this model: the layers of its target, if it drafts."""
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.pools or not self.is_encoder
        if not self.sliding_windows:
            return
        if len(self.sliding_windows) != self.num_layers:
            raise StartupError(
                f"sliding_windows has {len(self.sliding_windows)} entries "
                f"for {self.num_layers} layers."
            )

    def cache_scale_names(self, layer_index: int) -> tuple[str, str]:
        """Return the names of the tensors of a layer's `cache_scales`, if there are any."""
        source = self.heads_of(layer_index).source
        layer_index = layer_index if source is None else source
        attention, _, _ = self.names.attention_output.rpartition(".")
        prefix = f"{self.names.decoder_layer.format(layer_index)}.{attention}"
        return f"{prefix}.k_scale", f"{prefix}.v_scale"

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layers have an MLP that is not chosen by a router."""
        layers = range(self.num_layers)
        return self.has_side_experts or any(self.experts_of(layer) is None for layer in layers)

    @property
    def has_side_experts(self) -> bool:
        """Whether layers with experts have an MLP too."""
        return self.experts is not None and self.names.side_mlp_norm is not None

    @property
    def pools(self) -> bool:
        """Whether hidden states are pooled into vectors or scores, and nothing is generated."""
        return self.task != "generate"

    @property
    def vector_size(self) -> int:
        """The length of the result of a text: a vector, or a single score."""
        if self.task == "score":
            return 1
        return self.dense_modules[-1].out_size if self.dense_modules else self.hidden_size

    def with_context(self, length: int) -> ModelConfig:
        """Return the configuration for sequences of this length, by `long_context` if needed."""
        if self.long_context is None or length <= self.max_positions:
            return self
        long = self.long_context
        return replace(self, rope=long.rope, max_positions=long.max_positions, long_context=None)

    def with_expert_parallel(self) -> ModelConfig:
        """Return the configuration with whole experts on each rank. Raises StartupError."""
        if self.experts is None:
            raise StartupError(
                f"enable_expert_parallel requires a model with experts; {self.name} has none."
            )
        return replace(self, experts=replace(self.experts, is_expert_parallel=True))

    def sliding_window(self, layer: int) -> int | None:
        """Return how many keys a query of `layer` attends to, or None for all."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    def heads_of(self, layer: int) -> LayerHeads:
        """Return the keys and values of `layer`."""
        if self.layer_heads:
            return self.layer_heads[layer]
        return LayerHeads(num_kv_heads=self.num_kv_heads, head_size=self.head_size)

    @property
    def has_states(self) -> bool:
        """Whether sequences have a recurrent state."""
        return self.recurrent is not None

    def is_recurrent(self, layer: int) -> bool:
        """Return whether `layer` has a recurrent state."""
        return self.recurrent is not None and layer in self.recurrent.layers

    def has_attention(self, layer: int) -> bool:
        """Return whether `layer` has attention, in place of a recurrent layer or beside it."""
        is_beside = self.recurrent is not None and self.recurrent.is_beside_attention
        return is_beside or not self.is_recurrent(layer)

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """The layers with keys and values of their own."""
        layers = range(self.num_layers)
        return tuple(
            layer
            for layer in layers
            if self.heads_of(layer).source is None and self.has_attention(layer)
        )

    @property
    def cache_indices(self) -> tuple[int | None, ...]:
        """The layer of the KV cache with the keys and values that each layer reads.

        None for layers without attention.
        """
        cached = {layer: index for index, layer in enumerate(self.cached_layers, self.cache_offset)}
        sources = [self.heads_of(layer).source for layer in range(self.num_layers)]
        return tuple(
            cached.get(layer if source is None else source) for layer, source in enumerate(sources)
        )

    def places_of(self, layer: int) -> tuple[int, int | None]:
        """Return the indices of mixer and MLP of `layer` in the names of tensors."""
        return self.layer_places[layer] if self.layer_places else (layer, layer)

    def mlp_size(self, layer: int) -> int:
        """Return the columns of the MLP of `layer`."""
        return self.mlp_sizes[layer] if self.mlp_sizes else self.intermediate_size

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """Return the experts of `layer`, or None if it has one MLP."""
        is_dense = self.experts is None or layer in self.experts.dense_layers
        return None if is_dense else self.experts

    def rope_of(self, layer: int) -> RopeConfig | None:
        """Return the RoPE of `layer`, or None."""
        if self.rotated_layers and not self.rotated_layers[layer]:
            return None
        has_window = self.sliding_window(layer) is not None
        return self.window_rope if has_window and self.window_rope is not None else self.rope


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHeadConfig:
    """A decoder layer that drafts tokens from hidden states of a target: EAGLE-3 or MTP.

    Y. Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
    Training-Time Test", 2025.
    """

    layer: ModelConfig
    """The layer, as a model of one layer with the vocabulary of the target."""
    draft_vocab_size: int
    """The number of tokens that the head can draft."""
    tapped_layers: tuple[int, ...]
    """The layers of the target with the inputs that the head reads; `num_layers` is the input of
    the last norm."""
    mtp: MtpLayer | None = None
    """The names of an MTP layer; None is a head of EAGLE-3, which the later fields describe."""
    norms_all_taps: bool = False
    """Whether one norm is over the inputs of all tapped layers."""
    norms_each_tap: bool = False
    """Whether the input of each tapped layer has a norm of its own."""
    norms_residual: bool = False
    """Whether the layer adds to its state behind the norm of the state."""
    norms_output: bool = False
    """Whether the state of the next draft is behind the last norm."""
    has_embedding: bool = False
    """Whether the checkpoint has an embedding; otherwise, the head uses that of the target."""
    has_token_map: bool = True
    """Whether the checkpoint says which tokens the head can draft; otherwise, it is all tokens."""
    num_drafts: int | None = None
    """The number of drafts that the checkpoint suggests, or None."""
