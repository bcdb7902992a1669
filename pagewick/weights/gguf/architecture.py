"""GgufArchitecture: the meaning of the GGUF files of one architecture, and what several have in common. No torch.

Source of the keys and names: https://github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py, and its converter, which
writes the files. `{}` in a tensor's name stands for an expert, for a head whose norm has a weight of its own, or for
another place in a tensor that stacks several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

# Key of the metadata, without the architecture before it -> entry of config.json.
ENTRIES: Final = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
EXPERT_ENTRIES: Final = {
    **ENTRIES,
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
LATENT_ENTRIES: Final = {
    **{key: name for key, name in ENTRIES.items() if name != "num_key_value_heads"},
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
# Metadata without which no model can be built. The others have defaults, or not every model has them.
REQUIRED: Final = ("context_length", "embedding_length", "feed_forward_length", "attention.head_count", "block_count")
RMS: Final = (*REQUIRED, "attention.layer_norm_rms_epsilon")
LAYER_NORM: Final = (*REQUIRED, "attention.layer_norm_epsilon")
EXPERTS: Final = (*RMS, "expert_count", "expert_used_count")

# Names of tensors without `.weight` and `.bias`: those of a layer, and those of the whole model.
ATTENTION: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
GATED_MLP: Final = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER: Final = {**ATTENTION, **GATED_MLP}
HEAD_NORMS: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
ROUTED: Final = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
SHARED: Final = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
SANDWICH: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LATENT: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_output": "self_attn.o_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
# An MLP whose norm has another name.
DENSE: Final = {name: theirs for name, theirs in GATED_MLP.items() if name != "ffn_norm"}
# Experts chosen by sigmoids and a learned bias, and shared ones.
CHOSEN_ENTRIES: Final = {
    **{key: name for key, name in LATENT_ENTRIES.items() if "lora" not in key and key != "rope.dimension_count"},
    "attention.head_count_kv": "num_key_value_heads",
    "expert_weights_norm": "norm_topk_prob",
}
CHOSEN: Final = {name: theirs for name, theirs in LATENT.items() if not name.startswith("attn")}
# Tensors whose names end here in Hugging Face's checkpoints -> the ending of their names in files, if any.
WITHOUT_ENDING: Final = {
    "exp_probs_b": "bias",
    "attn_sinks": "weight",
    "ssm_dt": "bias",
    "ssm_a": "",
    "ssm_d": "",
    "layer_output_scale": "weight",
    "altup_correct_scale": "weight",
    "ffn_gate_inp.scale": "",
    "ffn_down_exps.scale": "",
}
# Convolutions of queries, keys and values, [1, channels, 1, tokens] in files.
SEPARATE_CONVOLUTIONS: Final = frozenset({"ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v"})
# Convolutions of layers with a state, [channels, 1, tokens] in checkpoints; the others are [channels, tokens] in files.
CONVOLUTIONS: Final = frozenset({"ssm_conv1d", "shortconv.conv", *SEPARATE_CONVOLUTIONS})
# Vectors in checkpoints that are matrices in files of Mamba-2 and Ling 3.0: [heads, 1], and [groups, numbers of each].
VECTORS: Final = frozenset({"ssm_a", "ssm_d", "ssm_norm"})
# Names of the layer that predicts further tokens, which stands behind the model's own: the prefix of its tensors in
# checkpoints, with its number for `{}`, and those of the tensors around it. Its embeddings and head are the model's.
NEXTN: Final = {
    "": "model.layers.{}.",
    "nextn.eh_proj": "model.layers.{}.eh_proj",
    "nextn.enorm": "model.layers.{}.enorm",
    "nextn.hnorm": "model.layers.{}.hnorm",
    "nextn.shared_head_norm": "model.layers.{}.shared_head.norm",
}
QWEN_MTP: Final = {
    "": "mtp.layers.0.",
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
}
WHOLE: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# The head of labels, which rerankers have.
LABELS: Final = {"cls.output": "score"}
# Granite's factors.
FACTORS: Final = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
# Mixtral's names of experts.
NUMBERED: Final = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
# Entries that are true if a tensor exists.
BIAS: Final = {"attention_bias": "attn_q.bias"}
LLAMA_HAS: Final = {**BIAS, "mlp_bias": "ffn_down.bias"}
# Positions of text are the same on all axes of images.
AXES: Final = frozenset({"rope.dimension_sections"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """The meaning of the GGUF files of one architecture.

    name: the architecture of a config.json. entries: metadata -> entry of config.json. constants: entries that follow
    from the architecture. required: keys that every file has.
    has: entries that are true if a tensor of some layer exists, and false otherwise. lacks: the opposite.
    whole, layer: names of the tensors; layer_prefix: that of a layer, with its number for `{}`. linear: those of layers
    with linear attention that checkpoints call as they call another tensor of other layers. predicting: those of a
    layer that predicts further tokens, NEXTN or QWEN_MTP; empty: it is not read.
    is_permuted: the rows of queries and keys are stored with the two halves of each head interleaved.
    is_halved: the opposite, for the part of each head that turns: pairs are neighbours in the checkpoint only.
    is_by_head: attn_qkv has all queries, then all keys, then all values; the checkpoint has the queries, the key and
    the value of one key head after the other.
    norm_offset: is added to the weights of norms in the file, except those in plain_norms.
    harmless: keys that other architectures have where they compute something else, and this one does not.
    endings: those of tensors whose names end before them in checkpoints, if others than WITHOUT_ENDING's; None: a name
    has the same ending in both. vectors: tensors that are matrices in files and vectors in checkpoints.
    decay_shape: the checkpoint's shape of A_log, with -1 for the number of heads, if it is no vector. decay_sign: files
    have this times exp(A_log).
    rows: tensors that are a vector in some files and a matrix of one row in checkpoints. fixed: keys that all files
    have, with the same values. has_pattern: files have a list of which layers have a window.
    has_unused_keys: files have the keys and values of layers that borrow those of others, too, because llama.cpp asks
    for them.
    is_written: whether files can be written, too. is_encoder: tokens see those behind them, too.
    """

    name: str
    entries: Mapping[str, str] = field(default_factory=lambda: ENTRIES)
    required: tuple[str, ...] = RMS
    constants: Mapping[str, Any] = field(default_factory=dict)
    has: Mapping[str, str] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=lambda: WHOLE)
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    layer_prefix: str = "model.layers.{}."
    linear: Mapping[str, str] = field(default_factory=dict)
    predicting: Mapping[str, str] = field(default_factory=dict)
    is_permuted: bool = False
    is_halved: bool = False
    is_by_head: bool = False
    norm_offset: float = 0.0
    plain_norms: frozenset[str] = frozenset()
    harmless: frozenset[str] = frozenset()
    endings: Mapping[str, str | None] = field(default_factory=dict)
    vectors: frozenset[str] = VECTORS
    decay_shape: tuple[int, ...] = ()
    decay_sign: float = -1.0
    rows: frozenset[str] = frozenset({"ffn_gate_inp_shexp"})
    fixed: Mapping[str, Any] = field(default_factory=dict)
    has_pattern: bool = False
    has_unused_keys: bool = False
    is_written: bool = True
    is_encoder: bool = False

    def ending_of(self, stem: str) -> str | None:
        """Return the ending that a tensor's name has in files and not in checkpoints; None: it has the same in both."""
        return {**WITHOUT_ENDING, **self.endings}.get(stem)
