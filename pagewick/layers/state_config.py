"""The numbers in config.json that describe layers that keep a state of a sequence. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TILED: Final = "layers of linear attention: the file has their heads in llama.cpp's order"
"""Why several ranks cannot share layers whose DeltaConfig is_tiled."""

STEP_NORMS: Final = ("dt_layernorm", "b_layernorm", "c_layernorm")
"""The norms of steps, keys and queries of a ChannelScanConfig that has_norm_weights."""

# Numbers of 16 bits that a matrix of a chunk of tokens has for each of them (kernels/triton/chunks.py), if all chunks
# are half empty: chunks have 64 tokens, or 32 in float16, where their numbers are in float32.
_CHUNK_NUMBERS: Final = 128


def _chunk_width(num_copied: int, num_matrices: int, num_factors: int, *, is_float16: bool) -> int:
    """Return the numbers of 16 bits of a token that a GPU keeps beside the products while it takes prompts in chunks.

    num_copied: numbers of queries and keys that are copied. num_matrices: of a chunk, of all heads. num_factors:
    float32 numbers of a token. Prompts that are a little longer than a chunk leave half of their chunks empty.
    """
    return 2 * (2 if is_float16 else 1) * num_copied + _CHUNK_NUMBERS * num_matrices + 4 * num_factors


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    """Linear attention by the gated delta rule (arXiv:2412.06464). The numbers of heads are those of the whole model.

    num_key_heads: a divisor of num_value_heads; consecutive value heads share a key head. key_dim, value_dim: elements
    of a head. conv_size: tokens that the convolution sees, the new one included. norm_eps: of the norm of each value
    head. is_fused: the file has in_proj_qkvz, by key head; else in_proj_qkv and in_proj_z. has_fused_gates: it has
    in_proj_ba, by key head; else in_proj_b and in_proj_a. has_parts: it has q_proj, k_proj and v_proj in place of
    in_proj_qkv, and a convolution of each. is_tiled: the file's value heads are in another order, that of llama.cpp:
    the first one of each key head, then the second one of each, and so on.
    strength: a state takes in this times the sigmoid of in_proj_b's output.
    has_channel_decay: each number of a key decays by a factor of its own (Kimi Delta Attention, arXiv:2510.26692), and
    there are as many value heads as key heads; else a value head has one factor. has_sigmoid_gate: the gates of outputs
    are sigmoids, else SiLUs. gate_rank: the decays and the gates of outputs come from two vectors of this size: the
    file has f_a_proj and f_b_proj in place of in_proj_a, g_a_proj and g_b_proj in place of in_proj_z. is_decay_4d: the
    file has A_log as [1, 1, heads, 1]. decay_bound: with has_channel_decay, logarithms of factors are this, a number
    below 0, times a sigmoid (Ling 3.0); None: they have no bound.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int = 4
    norm_eps: float = 1e-6
    is_fused: bool = False
    has_fused_gates: bool = False
    is_tiled: bool = False
    has_parts: bool = False
    strength: float = 1.0
    has_channel_decay: bool = False
    has_sigmoid_gate: bool = False
    gate_rank: int | None = None
    is_decay_4d: bool = False
    decay_bound: float | None = None

    @property
    def decays_per_head(self) -> int:
        """Factors by which a value head's state of a token decays."""
        return self.key_dim if self.has_channel_decay else 1

    @property
    def num_channels(self) -> int:
        """Numbers of queries, keys and values together."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def products_width(self, *, is_float16: bool = False) -> int:
        """Return the numbers of a token in the layer's products. The convolution's are in float32, and count twice."""
        values = self.num_value_heads * self.value_dim
        gates = 2 * (self.gate_rank or 0) + self.num_value_heads * self.decays_per_head
        return 3 * self.num_channels + 2 * values + self.chunk_width(is_float16=is_float16) + gates

    def chunk_width(self, *, is_float16: bool) -> int:
        """Return the numbers of a token for chunks: of queries and keys, two matrices of a value head, and factors.

        Keys are copied twice where channels decay by themselves, and have a factor in each chunk; else a value head has
        two for each token.
        """
        keys, heads = self.num_key_heads * self.key_dim, self.num_value_heads
        if self.has_channel_decay:
            return _chunk_width(3 * keys, 2 * heads, -(-keys // 16), is_float16=is_float16)
        return _chunk_width(2 * keys, 2 * heads, 2 * heads, is_float16=is_float16)

    def state_bytes(self, num_ranks: int = 1) -> int:
        """Return the bytes of a sequence's state on each rank: float32, as kernels.gated_delta_net lays it out."""
        convolution = (self.conv_size - 1) * self.num_channels
        return 4 * (convolution + self.num_value_heads * self.key_dim * self.value_dim) // num_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig:
    """A layer of Mamba-2 (arXiv:2405.21060). The numbers of heads and groups are those of the whole model.

    num_groups: a divisor of num_heads; consecutive heads share a group's keys and queries of state_dim numbers.
    conv_size: tokens that the convolution sees, the new one included. has_bias: the input and output projections have
    biases. has_norm: the result is normalised, each group's heads as one vector; is_norm_first: before its gate.
    scales: factors of the input projection's outputs: gates, values, keys, queries, steps.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_size: int = 4
    norm_eps: float = 1e-6
    has_bias: bool = False
    has_conv_bias: bool = True
    has_norm: bool = True
    is_norm_first: bool = False
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)

    @property
    def num_values(self) -> int:
        """Numbers of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Numbers of values, keys and queries together."""
        return self.num_values + 2 * self.num_groups * self.state_dim

    def products_width(self, *, is_float16: bool = False) -> int:
        """Return the numbers of a token in the layer's products. The convolution's are in float32, and count twice."""
        return 3 * self.num_channels + 2 * self.num_values + self.num_heads + self.chunk_width(is_float16=is_float16)

    def chunk_width(self, *, is_float16: bool) -> int:
        """Return the numbers of a token for chunks: of queries and keys, a matrix of a head, and two factors of it."""
        copied = 2 * self.num_groups * self.state_dim
        return _chunk_width(copied, self.num_heads, 2 * self.num_heads, is_float16=is_float16)

    def groups_of(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """Return the range of the groups that a rank's heads use. Ranks may share a model's only group."""
        if self.num_groups == 1:
            return 0, 1
        return rank * self.num_groups // num_ranks, (rank + 1) * self.num_groups // num_ranks

    def state_bytes(self, num_ranks: int = 1) -> int:
        """Return the bytes of a sequence's state on each rank: float32, as kernels.selective_scan lays it out."""
        first, last = self.groups_of(0, num_ranks)
        channels = self.num_values // num_ranks + 2 * (last - first) * self.state_dim
        return 4 * ((self.conv_size - 1) * channels + self.num_values * self.state_dim // num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionConfig:
    """A gated short convolution (LFM2, arXiv:2511.23404) of num_channels channels.

    conv_size: tokens that it sees, the new one included. has_bias: the convolution and both projections have biases.
    """

    num_channels: int
    conv_size: int = 3
    has_bias: bool = False

    def products_width(self, *, is_float16: bool = False) -> int:
        """Return the numbers of a token in the layer's products."""
        return 4 * self.num_channels

    def state_bytes(self, num_ranks: int = 1) -> int:
        """Return the bytes of a sequence's state on each rank: float32, as kernels.short_convolution lays it out."""
        return 4 * (self.conv_size - 1) * -(-self.num_channels // num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelScanConfig:
    """A layer of Mamba-1 (arXiv:2312.00752) of num_channels channels, each with a state of state_dim numbers.

    step_rank: size of the vector from which the channels' steps come. conv_size: tokens that the convolution sees, the
    new one included. has_bias: the input and output projections have biases. norm_eps: that vector, keys and queries
    are divided by their root mean squares, with this eps (FalconMamba); None: they are not. has_norm_weights: each is
    multiplied by a weight behind that (Jamba).
    """

    num_channels: int
    state_dim: int
    step_rank: int
    conv_size: int = 4
    has_bias: bool = False
    has_conv_bias: bool = True
    norm_eps: float | None = None
    has_norm_weights: bool = False

    def products_width(self, *, is_float16: bool = False) -> int:
        """Return the numbers of a token in the layer's products, and states of 16 between chunks of 64 on a GPU."""
        return 6 * self.num_channels + 2 * (self.step_rank + 2 * self.state_dim)

    def state_bytes(self, num_ranks: int = 1) -> int:
        """Return the bytes of a sequence's state on each rank: float32, inputs of the convolution, then the states."""
        return 4 * (self.conv_size - 1 + self.state_dim) * -(-self.num_channels // num_ranks)


StateConfig = DeltaConfig | MambaConfig | ConvolutionConfig | ChannelScanConfig
"""A layer that keeps one state of a sequence, and nothing of each token."""
