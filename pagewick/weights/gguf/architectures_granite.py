"""The architectures of GGUF files of Granite 3, as tables like those in architectures.py. Imports no torch.

Granite 4 with Mamba-2 is in architectures_hybrid.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from pagewick.weights.gguf import architecture as common
from pagewick.weights.gguf.architecture import GgufArchitecture

_GRANITE_MOE: Final = GgufArchitecture(
    name="GraniteMoeForCausalLM",
    entries={
        **common.ENTRIES,
        **common.FACTORS,
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    },
    required=common.EXPERTS,
    has=common.BIAS,
    layer={
        **common.ATTENTION,
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_gate_exps": "block_sparse_moe.{}.gate_proj",
        "ffn_up_exps": "block_sparse_moe.{}.up_proj",
        "ffn_down_exps": "block_sparse_moe.{}.down_proj",
    },
    is_permuted=True,
)
GRANITE_MOE_SHARED: Final = replace(
    _GRANITE_MOE,
    name="GraniteMoeSharedForCausalLM",
    entries={**_GRANITE_MOE.entries, "expert_shared_feed_forward_length": "shared_intermediate_size"},
    constants={"shared_mlp_fused": False},
    layer={
        **_GRANITE_MOE.layer,
        "ffn_gate_shexp": "shared_mlp.gate_proj",
        "ffn_up_shexp": "shared_mlp.up_proj",
        "ffn_down_shexp": "shared_mlp.down_proj",
    },
)

# general.architecture -> its meaning. `granitemoe` with a shared expert is GRANITE_MOE_SHARED.
ARCHITECTURES_GRANITE: Final[Mapping[str, GgufArchitecture]] = {
    "granite": GgufArchitecture(
        name="GraniteForCausalLM",
        entries={**common.ENTRIES, **common.FACTORS},
        has=common.LLAMA_HAS,
        is_permuted=True,
    ),
    "granitemoe": _GRANITE_MOE,
}
