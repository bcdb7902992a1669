"""The demo model as a plain PyTorch module, for training only.

The engine has its own, faster decoder; this one exists so that training needs nothing but torch. Parameter names are
those of Hugging Face's `Qwen3ForCausalLM`, so `state_dict()` is the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.batches import Group, MicroBatch


@dataclass(frozen=True)
class NetworkConfig:
    """Sizes of the demo model, under the names of a Hugging Face `config.json`."""

    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    def to_hugging_face(self, *, end_id: int, pad_id: int) -> dict[str, Any]:
        """The content of `config.json`."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **asdict(self),
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "sliding_window": None,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "bos_token_id": pad_id,
            "eos_token_id": end_id,
        }


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = self.weight.to(hidden_states.dtype)
        return F.rms_norm(hidden_states, weight.shape, weight, self.eps)


def rope_tables(length: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[length, head_dim]` for the half-rotation form of RoPE (arXiv 2104.09864)."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), theta**-exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to `x[tokens, heads, head_dim]`, with tables `[tokens, 1, head_dim]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.num_groups = config.num_attention_heads // config.num_key_value_heads

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor, groups: Sequence[Group]) -> Tensor:
        """Attention over `hidden_states[tokens, hidden]` within each example of the groups; 0 behind the last group."""
        shape = (len(hidden_states), -1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(hidden_states).view(shape)), cos, sin)
        k = rotate(self.k_norm(self.k_proj(hidden_states).view(shape)), cos, sin)
        v = self.v_proj(hidden_states).view(shape)
        outputs, first = [], 0
        for group in groups:
            rows = slice(first, first + group.num_examples * group.length)
            outputs.append(self._attend(q[rows], k[rows], v[rows], group))
            first = rows.stop
        outputs.append(q.new_zeros(len(q) - first, self.num_groups * k.shape[1] * self.head_dim))
        projected: Tensor = self.o_proj(torch.cat(outputs))
        return projected

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, group: Group) -> Tensor:
        """Attention of a group's examples, as `[tokens, heads * head_dim]`.

        Two products and a softmax: the backward pass of PyTorch's own attention takes a fifth of a step for sequences
        as short as these. Padding is behind an example's tokens, where causal attention does not look.
        """
        (num_examples, length), num_kv_heads = group, k.shape[1]
        # The heads that share keys and values become further rows of one product.
        heads = (num_examples, num_kv_heads, self.num_groups, length, self.head_dim)
        rows = q.view(num_examples, length, num_kv_heads, self.num_groups, self.head_dim)
        rows = rows.permute(0, 2, 3, 1, 4).reshape(num_examples * num_kv_heads, -1, self.head_dim)
        shape = (num_examples, length, num_kv_heads, self.head_dim)
        keys, values = (x.view(shape).transpose(1, 2).flatten(0, 1) for x in (k, v))
        scores = (rows @ keys.transpose(1, 2)).view(-1, self.num_groups, length, length)
        mask = torch.full((length, length), -torch.inf, dtype=scores.dtype, device=scores.device).triu(1)
        weights = torch.softmax(torch.add(mask, scores, alpha=self.head_dim**-0.5), dim=-1)
        output = (weights.view(len(rows), -1, length) @ values).view(heads)
        return output.permute(0, 3, 1, 2, 4).reshape(num_examples * length, -1)


class MLP(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))
        return output


class Block(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor, groups: Sequence[Group]) -> Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), cos, sin, groups)
        output: Tensor = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return output


class Backbone(nn.Module):
    """Everything but the head; its name in the checkpoint is `model`."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, batch: MicroBatch) -> Tensor:
        device = batch.input_ids.device
        hidden_states = self.embed_tokens(batch.input_ids)
        if torch.is_autocast_enabled(device.type):
            hidden_states = hidden_states.to(torch.get_autocast_dtype(device.type))
        length = max(group.length for group in batch.groups)
        tables = rope_tables(length, self.config.head_dim, self.config.rope_theta, device)
        cos, sin = (table.to(hidden_states.dtype)[batch.positions, None] for table in tables)
        for layer in self.layers:
            hidden_states = layer(hidden_states, cos, sin, batch.groups)
        output: Tensor = self.norm(hidden_states)
        return output


class Network(nn.Module):
    """Decoder with a tied head. `forward(batch)` returns hidden states `[tokens, hidden]`."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Residual outputs start small so that the depth does not blow up the sum (GPT-2's rule).
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / (2 * config.num_hidden_layers) ** 0.5 if is_output else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, batch: MicroBatch) -> Tensor:
        hidden_states: Tensor = self.model(batch)
        return hidden_states

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Scores `[..., vocab_size]` of the next token."""
        return F.linear(hidden_states, self.model.embed_tokens.weight)


def num_parameters(config: NetworkConfig) -> int:
    """The number of parameters of a network, without building it."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Network(config).parameters())
