"""Tiny models whose GGUF files lie in `files/`, written by llama.cpp's converter (convert.py), and their originals.

Weights are multiples of 1/16, so that the files are small when they are compressed. Wide models have rows of 256, which
blocks of ggml's K types fill; their files in `files/wide` hold zeros, which `fill` replaces.
"""

from __future__ import annotations

import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from pagewick.weights.gguf.checkpoint import open_gguf
from pagewick.weights.gguf.header import GgufTensor
from pagewick.weights.gguf.pieces import JoinedPiece
from tests.models.checkpoints import make_model
from tests.models.variants import VARIANTS
from tests.models.variants.deepseek import FACTORS, YARN
from tests.models.variants.phi import longrope
from tests.models.variants.variant import rope
from tests.weights.gguf.models_2026 import MODELS_2026
from tests.weights.gguf.models_2026 import SIZES as _SIZES
from tests.weights.gguf.models_2026 import WIDE as _WIDE

FILES: Final = Path(__file__).parent / "files"
VOCAB_SIZE: Final = 97
_HEADS: Final = {**_WIDE, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 16}
_LATENT: Final = {**_HEADS, "moe_intermediate_size": 32}
_FEW: Final = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_FEW_WIDE: Final = {**_WIDE, "num_experts": 4, "num_experts_per_tok": 2}
_SHARED: Final = {**_FEW, "shared_expert_intermediate_size": 64}
_SMALL: Final = {"moe_intermediate_size": 32}
_STATE: Final = {
    "hidden_size": 64, "num_hidden_layers": 4, "linear_num_key_heads": 3, "linear_num_value_heads": 6,
    "linear_value_head_dim": 16,
}  # fmt: skip
_EXPERTS: Final = {**_WIDE, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
_STATES: Final = {"layer_types": ["linear_attention", "full_attention"]}
# The converter knows heads of 64 numbers only, if it finds no entry of another model.
_NEMOTRON: Final = {**_WIDE, "mamba_head_dim": 16}
# The converter writes this context, whatever config.json has.
_ALONE: Final = {"num_hidden_layers": 2, "max_position_embeddings": 2**20}


def _with_images(name: str, **entries: Any) -> Mapping[str, Any]:
    """Entries for the text part of a model that also sees images; files hold no others.

    Random weights of the vision part come before those of the text part, so that its sizes decide about the latter.
    """
    sizes = {**_SIZES, **_WIDE, "num_key_value_heads": 2, **entries}
    vision = {
        "depth": 1, "hidden_size": 16, "embed_dim": 16, "num_heads": 2, "patch_size": 4, "intermediate_size": 24,
        "out_hidden_size": 96, "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    }  # fmt: skip
    return {"text_config": {**VARIANTS[name].entries["text_config"], **sizes}, "vision_config": vision}


# Variant -> entries that differ from it, because GGUF files of the architecture have no key for them, or for Q8_0.
MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama3-rope": _WIDE,
    "llama-bias-tied": _WIDE,
    "llama-linear-rope": _WIDE,
    "llama-yarn-rope": _WIDE,
    "mixtral": _WIDE,
    "granite": _WIDE,
    "qwen2": _WIDE,
    # llama.cpp has the numbers of chunks and of scales in its code.
    "llama4-scout": {
        **_EXPERTS,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 4,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    "qwen2-moe": {**_WIDE, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "qwen3": _WIDE,
    "qwen3-moe": {**_WIDE, "moe_intermediate_size": 32},
    # The converter writes four times the hidden size, and no theta.
    "phi-2": {"intermediate_size": 384, **rope(partial_rotary_factor=0.375)},
    "phi-3-mini-4k": {},
    "phi-3.5-mini-long": {},
    "phi-4-mini-long": {},
    "command-a-plus": {**_FEW_WIDE, "intermediate_size": 32},
    "north-mini": {
        **_FEW_WIDE,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "prefix_dense_intermediate_size": 64,
    },
    # Files have neither the factor of its longrope nor the margin of its router, which are those of the one model.
    "phi-3.5-moe": {
        **longrope(160, short_mscale=1.243163121016122, long_mscale=1.243163121016122),
        "router_jitter_noise": 0.01,
        "intermediate_size": 32,
    },
    "stablelm-3b": {},
    "stablelm-2-1.6b": {},
    "stablelm-2-12b": {},
    "gemma-2b": {**_WIDE, "head_dim": 32},
    # The head's width is what llama.cpp divides by.
    "gemma-2": {**_WIDE, "query_pre_attn_scalar": 16},
    "gemma-3-1b": {**_WIDE, "query_pre_attn_scalar": 16, "num_hidden_layers": 7},
    # The converter reads neither the width of a head nor eps of files with such names.
    "glm-4-9b-chat": {**_WIDE, "head_dim": 16, "rms_norm_eps": 1e-5, **rope(partial_rotary_factor=0.5)},
    "glm-4-0414": _WIDE,
    "deepseek-v2-lite": {**_LATENT, "q_lora_rank": None},
    # There is a key for one of YaRN's two mscales.
    "deepseek-v2": {**_LATENT, "q_lora_rank": 32, **rope("yarn", 100.0, **YARN, mscale=0.6, mscale_all_dim=0.6)},
    "deepseek-v3": {**_LATENT, "q_lora_rank": 32},
    "youtu": {**_HEADS, "q_lora_rank": 32},
    "deepseek-v3.2": {**_LATENT, "q_lora_rank": 32, "index_head_dim": 32},
    "glm-5.2": {
        **_LATENT,
        "q_lora_rank": 32,
        "index_head_dim": 32,
        "num_hidden_layers": 3,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "gpt-oss": {**_WIDE, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    # The converter writes four times the hidden size, a length of 2048, and no theta.
    "gpt2": {},
    "pythia": rope(partial_rotary_factor=0.25),
    "falcon-7b": {"max_position_embeddings": 2048, **rope()},
    "falcon-40b": {"max_position_embeddings": 2048, "ffn_hidden_size": None, "bias": False},
    "olmo-0424": {**_WIDE, "attention_bias": False},
    "jais-2": _WIDE,
    # Files have no keys for these factors and for theta, and values share out the hidden size.
    "minicpm3": {
        **_LATENT,
        **rope("longrope", **FACTORS, original_max_position_embeddings=160),
        **{"q_lora_rank": 32, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
    },
    "starcoder": {},
    "starcoder2-3b": {"sliding_window": None},
    "qwen3-next": {**_SHARED, **_STATE},
    "qwen3.5": {**_STATE, "linear_num_key_heads": 6, "attention_bias": False},
    "qwen3.5-tied": _STATE,
    "qwen3.5-moe": {**_SHARED, **_STATE},
    "glm-4.5": {**_WIDE, **_SMALL},
    "glm-4.5-air": {**_WIDE, **_SMALL},
    # The converter wants four streams, and adds rows of zeros for tokens that have none.
    "gemma-3n": {
        **_WIDE,
        "num_hidden_layers": 5,
        "intermediate_size": 96,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 97,
        "altup_num_inputs": 4,
    },
    "gemma-4-e2b": {
        **_WIDE,
        "num_hidden_layers": 5,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 97,
    },
    "gemma-4-31b": {**_WIDE, "num_hidden_layers": 3},
    "gemma-4-26b-a4b": {**_WIDE, **_SMALL, "num_experts": 4, "top_k_experts": 2},
    "granite-moe": _EXPERTS,
    "granite-moe-shared": {**_EXPERTS, "shared_intermediate_size": 64},
    "olmo-2": _WIDE,
    "olmo-3": {**_WIDE, "num_hidden_layers": 4},
    # The converter writes this eps.
    "olmoe": {**_WIDE, "intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
    "smollm3": {**_WIDE, "num_hidden_layers": 4},
    "seed-oss": _WIDE,
    "ernie-4.5": _WIDE,
    "ernie-4.5-moe": {**_WIDE, **_SMALL, "moe_num_experts": 4, "moe_k": 2},
    "exaone-4-32b": {**_WIDE, "num_hidden_layers": 4},
    "exaone-4-1.2b": {**_WIDE, "layer_types": ["full_attention"] * 2},
    "hunyuan-tied": _WIDE,
    "hunyuan-a13b": {**_WIDE, "intermediate_size": 32, "num_experts": 4, "moe_topk": 2},
    "hy3": {**_WIDE, **_SMALL, "num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 2},
    # llama.cpp has no layers without experts.
    "mellum-2": {
        **_WIDE,
        **_SMALL,
        "num_hidden_layers": 4,
        "mlp_layer_types": ["sparse"] * 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "dots.llm1": {**_WIDE, **_SMALL},
    "arcee": _WIDE,
    "trinity-mini": {**_WIDE, **_SMALL, "num_hidden_layers": 4},
    "k-exaone": {**_WIDE, **_SMALL, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2},
    "internlm3": _WIDE,
    "nemotron": _WIDE,
    "minimax-m2": {**_EXPERTS, "rotary_dim": 8},
    "ministral-3": _WIDE,
    # Files have no key for mscale, and the converter leaves out how queries are scaled.
    "mistral-4": {
        **_LATENT,
        **rope("yarn", 100.0, **YARN, mscale=0.5, mscale_all_dim=0.5, llama_4_scaling_beta=0.1),
    },
    "command-r": _WIDE,
    "command-r7b": {**_WIDE, "num_hidden_layers": 4, "rotary_pct": 1.0},
    "qwen2-vl": _with_images("qwen2-vl"),
    "qwen3-vl": _with_images("qwen3-vl"),
    "qwen3-vl-moe": _with_images("qwen3-vl-moe", moe_intermediate_size=32, mlp_only_layers=[]),
    # Readers of the files know inner sizes of twice the hidden size, and FalconMamba's own eps of its inner norms.
    "mamba-1": {**_ALONE, "expand": 2, "intermediate_size": 192, "time_step_rank": 32},
    # The converter leaves out a head that equals the embedding, as both do where all weights are 0.
    "falcon-mamba": {
        **_ALONE,
        "intermediate_size": 192,
        "time_step_rank": 32,
        "mixer_rms_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "mamba-2": {**_ALONE, "intermediate_size": None},
    "jamba": {**_WIDE, "num_hidden_layers": 3, "num_experts": 3, "num_experts_per_tok": 2, "mamba_dt_rank": 32},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "intermediate_size": 144},
    # The converter writes no factor of experts.
    "lfm2-moe": {
        "layer_types": ["conv", "full_attention"],
        **_SMALL,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
    },
    # Published models have two sizes of an MLP, which are the same.
    "granite-4": {**_WIDE, "shared_intermediate_size": 96, "layer_types": ["full_attention"] * 2},
    "granite-4-h": {**_WIDE, "shared_intermediate_size": 96, **_STATES},
    "granite-4-h-moe": {**_EXPERTS, "shared_intermediate_size": 64, **_STATES},
    "bamba": _WIDE,
    "nemotron-h": {**_NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
    "nemotron-3-latents": {
        **_NEMOTRON,
        **_SMALL,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_shared_expert_intermediate_size": 64,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    },
    "glm-4.7-flash": {**_LATENT, "q_lora_rank": 32, "first_k_dense_replace": 1},
    **MODELS_2026,
}
# Files whose weights are products of the checkpoint's and the model's factors, so that bits differ.
FACTORED: Final = {"falcon-h1": {"head_dim": 16, "num_hidden_layers": 2}}
# Files in which heads keep llama.cpp's order, those with parts of a checkpoint's fused tensors, other names of them, or
# not all of them, and all those that hold other tensors than the checkpoint.
TILED: Final = frozenset({"qwen3.5-tied", "qwen3.5-moe"})
SEPARATED: Final = frozenset(
    {"qwen3-next", "granite-4", "granite-4-h", "granite-4-h-moe", "granite-moe-shared", "ling-3-tiny", "step-3.7"}
)
DIFFERENT: Final = (
    TILED | SEPARATED | {"gemma-4-26b-a4b", "granite-moe", "mistral-4", "qwen2-vl", "qwen3-vl", "qwen3-vl-moe"}
)
_READ: Final = {"Cohere2Moe", "MiniCPM3", "Phimoe", "Qwen2VL", "Qwen3VL", "Qwen3VLMoe"}
# Files that `pagewick quantize` can write.
WRITTEN: Final = tuple(name for name in MODELS if VARIANTS[name].config not in _READ)

WIDTH: Final = 256
_WIDE_ENTRIES: Final = {
    **dict.fromkeys(("hidden_size", "n_embd", "intermediate_size", "moe_intermediate_size"), WIDTH),
    **dict.fromkeys(("shared_expert_intermediate_size", "kv_lora_rank", "q_lora_rank"), WIDTH),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size"), WIDTH),
    **dict.fromkeys(("num_attention_heads", "n_head", "mamba_n_heads", "mamba_num_heads"), 16),
    **{"linear_num_heads": 16, "mamba_d_head": 32, "n_groups": 8, "num_heads": 32},
    "num_key_value_heads": None,
}
# Models whose MLPs or states have another width -> how often it is WIDTH.
_TIMES: Final = {"phi-2": 4, "mamba-1": 2, "falcon-mamba": 2}
_WIDE_KV_HEADS: Final = {1: 1, 2: 2, 3: 4, 6: 16}


def original(name: str, *, is_wide: bool = False) -> nn.Module:
    """The transformers model that the file was converted from."""
    variant = VARIANTS[name]
    entries = variant.all_entries()
    sizes = {key: value for key, value in _SIZES.items() if key in entries}
    entries = {**entries, **sizes, **{**MODELS, **FACTORED}[name]}
    if is_wide:
        return make_model(name, {key: _widened(name, key, value) for key, value in entries.items()})
    model = make_model(name, entries)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_((weight * 16).round() / 16)
    return model


def _widened(name: str, key: str, value: Any) -> Any:
    """The entry of a config.json for a model whose rows are multiples of 256, in 16 heads instead of 6."""
    if value is None or key not in _WIDE_ENTRIES:
        return value
    if key == "intermediate_size" and name in _TIMES:
        return _TIMES[name] * WIDTH
    return _WIDE_KV_HEADS[value] if key == "num_key_value_heads" else _WIDE_ENTRIES[key]


def write_file(name: str, directory: Path) -> Path:
    """Decompress the file of a model into a directory; return its path."""
    path = directory / f"{Path(name).name}.gguf"
    path.write_bytes(lzma.decompress((FILES / f"{name}.gguf.xz").read_bytes()))
    return path


def fill(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Overwrite the tensors of a float32 file by a checkpoint's, given by Hugging Face's names."""
    data = np.memmap(path, dtype=np.uint8, mode="r+")

    def write(tensor: GgufTensor, first_row: int, rows: Tensor) -> None:
        begin = tensor.offset + first_row * rows[0].numel() * 4
        assert tensor.format.name == "F32" and begin + rows.nbytes <= tensor.offset + tensor.num_bytes
        data[begin : begin + rows.nbytes] = np.frombuffer(rows.contiguous().numpy().tobytes(), np.uint8)

    for piece in open_gguf(path).text_pieces:
        weight = weights[piece.name].float()
        if isinstance(piece, JoinedPiece):
            heads = weight.unflatten(0, (piece.keys.shape[0], -1))
            num_keys = piece.keys.shape[2]
            write(piece.keys, 0, heads[:, :num_keys].transpose(1, 2))
            write(piece.values, 0, heads[:, num_keys:])
            continue
        rows = weight.reshape(piece.num_rows, piece.row_size)
        if piece.num_heads:
            rows = rows.view(piece.num_heads, 2, -1, piece.row_size).transpose(1, 2).reshape(rows.shape)
        if piece.key_heads is not None:
            num_keys, num_queries = piece.key_heads
            heads = rows.view(num_keys, num_queries + 2, -1, piece.row_size)
            kinds = [heads[:, [*range(num_queries)]], heads[:, num_queries], heads[:, num_queries + 1]]
            rows = torch.cat([kind.reshape(-1, piece.row_size) for kind in kinds])
        content = piece.decay_sign * rows.exp() if piece.decay_sign else rows + piece.offset
        write(piece.tensor, piece.start, content)
