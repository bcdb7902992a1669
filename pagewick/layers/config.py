"""The numbers in config.json that describe rotary embedding, latent attention, and experts. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from pagewick.errors import ConfigError
from pagewick.expert_routing import Routing

CLIP_BOUNDS: Final = ("input_min", "input_max", "output_min", "output_max")
"""The tensors of a checkpoint that limit the inputs and outputs of a product (layers.clipped)."""

XIELU_SHAPES: Final = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
"""The tensors of a checkpoint with the numbers of xIELU, and their shapes (layers.elementwise)."""

# Products on a GPU need inner sizes that are multiples of this number.
_RANK_STEP: Final = 16

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rotary embedding. Names are Hugging Face's; most numbers belong to one scaling `kind`.

    theta: base of the frequencies.
    rotary_dim: number of values of a head that are rotated, an even number; the rest stay as they are.
    interleaved: pairs are neighbours (0, 1), (2, 3), ...; otherwise value i turns with value i + rotary_dim / 2.
    original_max_position_embeddings: the length before the scaling; `dynamic` changes only longer sequences.
    attention_factor: multiplies cos and sin, and so every score by its square.
    mscale_all_dim: yarn's; models with a latent cache scale their scores by it too. 0 if there is none.
    short_factor, long_factor: longrope's divisors, one for each frequency.
    head_dim: proportional's; frequencies are spread over a head of this size, of which the pairs beyond rotary_dim
    stand still, and pairs are (i, i + head_dim / 2).
    is_reversed: pairs turn in the other direction; not with dynamic.
    is_learned: the file has a tensor, alpha: each frequency is multiplied by e to the power of its number (LeRoPE, in
    Mistral Large 4); not with dynamic.
    query_beta: queries are also multiplied by 1 + query_beta * log(1 + floor(position / the original length)).
    mrope_section: in models that see images, the numbers of pairs that turn with a token's position in time, its row
    and its column; they add up to rotary_dim / 2. Empty: all pairs turn with the token's only position.
    num_still: numbers of a head before those that are rotated, of which the pairs stand still: angles count them, too.
    mrope_interleaved: time, row and column take turns at the pairs, until the row or the column has all of its own;
    time has the rest. Otherwise the sections follow each other.
    """

    theta: float
    kind: RopeKind
    rotary_dim: int
    interleaved: bool = False
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    mscale_all_dim: float = 0.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    # Not in the repr, which is a part of the names of KV blocks on disk: blocks of text models keep their names, and
    # keys do not depend on the scale of queries.
    head_dim: int = field(default=0, repr=False)
    query_beta: float = field(default=0.0, repr=False)
    is_learned: bool = field(default=False, repr=False)
    is_reversed: bool = field(default=False, repr=False)
    num_still: int = field(default=0, repr=False)
    mrope_section: tuple[int, ...] = field(default=(), repr=False)
    mrope_interleaved: bool = field(default=False, repr=False)

    @property
    def has_fitting_sections(self) -> bool:
        """Whether three sections cover all pairs, and, if they alternate, none has a pair beyond the last one."""
        num_pairs, sections = self.rotary_dim // 2, self.mrope_section
        if len(sections) != 3 or sum(sections) != num_pairs:
            return False
        ends = [axis + 3 * (sections[axis] - 1) for axis in (1, 2)] if self.mrope_interleaved else []
        return max(ends, default=0) < num_pairs


@dataclass(frozen=True, slots=True)
class QueryScaleConfig:
    """Factors of queries by their position: 1 + beta * log(1 + floor((position + 1) / length)) (Llama 4)."""

    beta: float
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerConfig:
    """How a layer with latent attention selects the tokens that each token sees (DeepSeek-V3.2, arXiv:2512.02556).

    num_heads, head_dim: of the indexer. top_k: tokens that are selected. is_interleaved: as MlaConfig.rope_interleaved,
    for the indexer's queries and keys, of which the first qk_rope_head_dim elements rotate. num_last: the number of
    last elements that rotate in their place; 0: the first do. norm_eps: of the norm of keys. is_shared: the layer has
    no indexer, and sees what the nearest layer before it that has one has selected. reads_hidden_states: queries are
    made from hidden states behind a layer norm of their own, not from what the queries of attention are made from.
    has_log_scales: as MlaConfig.has_log_scales, for the indexer's heads.
    """

    num_heads: int
    head_dim: int
    top_k: int
    is_interleaved: bool
    num_last: int = 0
    norm_eps: float = 1e-6
    is_shared: bool = False
    reads_hidden_states: bool = False
    has_log_scales: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBlockConfig:
    """How a layer selects the blocks of tokens that each KV head's queries see (layers/head_blocks.py).

    num_heads: index heads, each for as many successive KV heads. head_dim: of the indexer. block_size: tokens of a
    block. top_k: blocks that a token sees, of which the last num_local, its own included, are not chosen. norm_eps: of
    the norms of the indexer's queries and keys, 1 + weight.
    """

    num_heads: int
    head_dim: int
    block_size: int
    top_k: int
    num_local: int
    norm_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConfig:
    """Hyper-connections of `num_streams` residual streams (layers/hyper.py).

    num_iterations: of the normalisation of a mixing matrix; 0: streams are not mixed, but each keeps what it has.
    magnitude: factor of the weights of outputs. eps: of weights, of those of outputs only where streams are not mixed;
    norm_eps: of the norm of streams.
    """

    num_streams: int
    num_iterations: int
    eps: float
    norm_eps: float
    magnitude: float = 2.0

    @property
    def num_kinds(self) -> int:
        """Kinds of weights of a connection: of the sum, of the output, and of each stream in each if they are mixed."""
        return 3 if self.num_iterations else 2

    @property
    def num_weights(self) -> int:
        """Weights of a connection."""
        return (2 + (self.num_streams if self.num_iterations else 0)) * self.num_streams


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedStreamsConfig:
    """Several residual streams whose numbers each have a gate (layers/gated_streams.py).

    rank: of the two factors of the matrix that makes the gates. norm_eps: of the norms of streams.
    """

    num_streams: int
    rank: int
    norm_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig:
    """A latent attention. Names are Hugging Face's, except `num_heads`, which counts the heads of the whole model.

    q_lora_rank: rank of the query projection's two factors; None: it is one matrix. kv_lora_rank: size of a latent.
    qk_nope_head_dim, qk_rope_head_dim: elements of a query head that do not rotate, and that do.
    v_head_dim: elements of a value head.
    softmax_scale: factor of the scores; includes the square of YaRN's mscale if the model uses it.
    norm_eps: eps of the norms of both latents. attention_bias: q_a_proj, kv_a_proj_with_mqa and o_proj have biases.
    rope_interleaved: pairs that turn together are (2i, 2i + 1), else (i, i + qk_rope_head_dim / 2). indexer: None: a
    token sees all before it. With one that does not read hidden states, q_lora_rank is a number.
    has_own_latents: False: the layer attends to the latents of another one, LayerConfig.lender.
    has_shared_key: False: nothing of queries and keys rotates: queries have qk_nope_head_dim elements. The cache then
    holds qk_rope_head_dim zeros beside a latent, so that the blocks of all layers are alike.
    has_log_scales: queries are multiplied by scale * log(position + 1) + bias, with two numbers of the file for each
    head (scalable softmax, arXiv:2501.19399).
    latent_scale: factor of latents behind their norm.
    has_gates: each number of a head's output is multiplied by the sigmoid of one, which q_b_proj makes behind the
    head's query. It then reads the queries' latent as its norm makes it, and as the norm gets it; q_lora_rank is a
    number. has_head_gates: it is multiplied by the sigmoid of one number, which g_proj makes for each head from hidden
    states. has_number_gates: g_proj makes such a number for each of the head's. has_sinks: a further logit of each head
    in the softmax, which has no value; the layer has latents of its own.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float
    norm_eps: float = 1e-6
    attention_bias: bool = False
    rope_interleaved: bool = True
    indexer: IndexerConfig | None = None
    has_gates: bool = False
    has_head_gates: bool = False
    has_number_gates: bool = False
    has_sinks: bool = False
    latent_scale: float = 1.0
    has_own_latents: bool = True
    has_shared_key: bool = True
    has_log_scales: bool = False

    @property
    def key_dim(self) -> int:
        """Number of elements of a query, and of the key that all heads share, that rotate."""
        return self.qk_rope_head_dim if self.has_shared_key else 0

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.key_dim

    @property
    def query_rows(self) -> int:
        """Number of rows of a head in the projection that makes its query, and its gates if it has some."""
        return self.qk_head_dim + (self.v_head_dim if self.has_gates else 0)

    @property
    def latent_size(self) -> int:
        """Number of elements that are cached for a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """A feed-forward layer in which every token uses a few of `num_experts` experts, and the shared one if any.

    num_identities: further experts, behind those in the router's outputs, that have no weights and return their input.
    intermediate_size: size of one expert. is_gated: experts, the shared one too, are activation(gate(x)) * up(x), else
    activation(up(x)). has_expert_biases: all projections of experts but the shared one have biases.
    latent_size: inputs and outputs of all experts but the shared one have this size: one projection makes the inputs
    from hidden states, and another one hidden states from the sum of the outputs (Nemotron 3 Super). None: they are
    hidden states.
    routing: how experts are chosen. Router logits are sums in float32 that are not rounded before they are compared, as
    in DeepSeek's own code; that of Mixtral and Qwen rounds them to the model's dtype first.
    activation: a name in kernels.reference.ACTIVATIONS, for all experts.
    has_logit_bias: a number for each expert is added to its logit.
    has_router_bias: a number for each expert is added to its score for the choice only (e_score_correction_bias).
    has_root_scores: scores are the square roots of the softplus of logits, and the weights of a token's experts are
    their shares of the sum; the routing then is softmax, renormalized. has_expert_table: a token's experts are those
    that a table has for its id, and not those with the best scores. vocab_size: rows of this table.
    has_expert_scales: the weight of a chosen expert is multiplied by a number of its own.
    router_norm_eps: the router's inputs are normalised, with a weight of its own and this eps; None: they are not.
    logit_scale: factor of the router's outputs.
    is_router_bias_matrix: the file has these numbers as a matrix of one row.
    shared_intermediate_size: size of the expert that every token uses; None: there is none.
    shared_scale: factor of its output. shared_activation: its own one; None: that of the other experts.
    is_shared_fused: the file has the shared expert's gate and up in one tensor.
    has_shared_gate: the output of the shared expert is multiplied by the sigmoid of a gate's output (Qwen2-MoE).
    Raises ValueError if the numbers contradict each other.
    """

    num_experts: int
    intermediate_size: int
    routing: Routing
    activation: str = "silu"
    is_gated: bool = True
    num_identities: int = 0
    latent_size: int | None = None
    has_logit_bias: bool = False
    has_router_bias: bool = False
    has_expert_biases: bool = False
    has_root_scores: bool = False
    has_expert_table: bool = False
    vocab_size: int = 0
    has_expert_scales: bool = False
    router_norm_eps: float | None = None
    logit_scale: float = 1.0
    is_router_bias_matrix: bool = False
    shared_intermediate_size: int | None = None
    shared_scale: float = 1.0
    shared_activation: str | None = None
    is_shared_fused: bool = False
    has_shared_gate: bool = False

    def __post_init__(self) -> None:
        self.routing.check(self.num_experts + self.num_identities)
        if self.num_identities and (self.latent_size is not None or self.routing.weighs_inputs):
            raise ValueError("experts that return their input are not supported beside latents and weighed inputs")
        if self.has_shared_gate and self.shared_intermediate_size is None:
            raise ValueError("there is no shared expert for the shared gate")
        if self.has_shared_gate and self.latent_size is not None:
            raise ValueError("the gate of a shared expert beside latents is not supported")

    @property
    def input_projections(self) -> tuple[str, ...]:
        """Names of an expert's projections that read its inputs."""
        return ("gate_proj", "up_proj") if self.is_gated else ("up_proj",)

    def products_width(self, hidden_size: int, num_ranks: int) -> int:
        """Return the numbers of a token in the layer's products on each rank: results, and their activations."""
        top_k = self.routing.top_k
        inner = (1 + len(self.input_projections)) * (
            top_k * self.intermediate_size + (self.shared_intermediate_size or 0)
        )
        # Latents, too, are the inputs of experts and the sum of their outputs.
        outputs = top_k * hidden_size if self.latent_size is None else (top_k + 2) * self.latent_size
        if self.num_identities:
            # The products of experts with weights, and these with inputs in place of the others.
            outputs += top_k * hidden_size
        if self.routing.weighs_inputs:
            outputs += top_k * (self.latent_size or hidden_size)
        return -(-inner // num_ranks) + outputs

    def num_offloaded(self, per_rank: int, num_ranks: int) -> int:
        """Return how many experts are in host memory with --num-experts-offload-per-rank `per_rank`.

        Raises ConfigError if fewer would be left on the device than a token uses.
        """
        offloaded, top_k = per_rank * num_ranks, self.routing.top_k
        if offloaded and self.num_identities:
            raise ConfigError(
                f"--num-experts-offload-per-rank {per_rank}: it is not supported for models in which some experts have "
                "no weights; leave it out"
            )
        if self.num_experts - offloaded >= top_k:
            return offloaded
        ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
        raise ConfigError(
            f"--num-experts-offload-per-rank {per_rank} on {ranks} moves {offloaded} of {self.num_experts} experts to "
            f"host memory, and {top_k} must stay, as many as a token uses; give at most "
            f"{(self.num_experts - top_k) // num_ranks}"
        )


def padded_rank(rank: int) -> int:
    """Return the rank with which the factors of LoRA adapters of up to `rank` are stored; the rest is 0."""
    return -(-rank // _RANK_STEP) * _RANK_STEP
