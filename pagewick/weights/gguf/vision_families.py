"""The kinds of vision parts in GGUF files, as tables of what vision_family.py explains. Imports no torch.

Source of the keys and names: https://github.com/ggml-org/llama.cpp, tools/mtmd/clip-impl.h and clip.cpp, and its
converter, which writes the files. Limits: preprocessor_config.json of Qwen/Qwen2-VL-7B-Instruct,
Qwen/Qwen2.5-VL-7B-Instruct and Qwen/Qwen3-VL-8B-Instruct.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pagewick.weights.gguf.vision_family import LINEAR, VisionFamily

_BLOCK: Final = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
}
_SIGLIP_BLOCK: Final = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
# MiniCPM-V's step that makes a row of each square of patches, behind one of the blocks.
_WINDOW_MERGER: Final = {
    "ln1": "layer_norm1",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ds_ln": "pre_norm",
    "ds_ffn_up": "linear_1",
    "ds_ffn_down": "linear_2",
}
_TOWER: Final = "vision_tower"
_PROJECTOR: Final = "multi_modal_projector"
_WHOLE_QWEN2: Final = {"v.post_ln": "merger.ln_q", "mm.0": "merger.mlp.0", "mm.2": "merger.mlp.2"}


_QWEN25: Final = VisionFamily(
    models={"qwen2vl": "Qwen2_5_VLForConditionalGeneration"},
    whole=_WHOLE_QWEN2,
    block={**_BLOCK, "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
    activation="silu",
    uses=frozenset({"silu"}),
    limits=(56 * 56, 28 * 28 * 16384),
    is_gated=True,
)
_PIXTRAL: Final = VisionFamily(
    # Pixtral 12B has the first one, too, and another architecture.
    models=dict.fromkeys(("llama", "mistral3", "mistral4"), "Mistral3ForConditionalGeneration"),
    is_shared=True,
    text_types={
        "LlamaForCausalLM": "mistral",
        "Ministral3ForCausalLM": "ministral3",
        "Mistral4ForCausalLM": "mistral4",
    },
    whole={
        "v.patch_embd": f"{_TOWER}.patch_conv",
        "v.pre_ln": f"{_TOWER}.ln_pre",
        "mm.input_norm": f"{_PROJECTOR}.norm",
        "mm.patch_merger": f"{_PROJECTOR}.patch_merger.merging_layer",
        "mm.1": f"{_PROJECTOR}.linear_1",
        "mm.2": f"{_PROJECTOR}.linear_2",
    },
    block={
        "ln1": "attention_norm",
        "ln2": "ffn_norm",
        "attn_q": "attention.q_proj",
        "attn_k": "attention.k_proj",
        "attn_v": "attention.v_proj",
        "attn_out": "attention.o_proj",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
    activation="silu",
    uses=frozenset({"silu"}),
    eps=(1e-5,),
    is_gated=True,
    has_frames=False,
    prefix="",
    blocks=f"{_TOWER}.transformer.layers",
    is_permuted=True,
    has_patch_bias=False,
    # The embedding of a token, which the text part has.
    others=r"v\.token_embd\.img_break",
    placeholder="[IMG]",
)
_LIGHTON: Final = replace(
    _PIXTRAL,
    models={"qwen3": "LightOnOcrForConditionalGeneration"},
    text_types={"Qwen3ForCausalLM": "qwen3"},
    whole={
        name: theirs.replace(_TOWER, "vision_encoder").replace(_PROJECTOR, "vision_projection")
        for name, theirs in _PIXTRAL.whole.items()
    },
    blocks="vision_encoder.transformer.layers",
    others="",
    placeholder="<|image_pad|>",
)

FAMILIES: Final = {
    "qwen2vl_merger": VisionFamily(
        models={"qwen2vl": "Qwen2VLForConditionalGeneration"},
        whole=_WHOLE_QWEN2,
        block={**_BLOCK, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        activation="quick_gelu",
        uses=frozenset(),
        limits=(56 * 56, 28 * 28 * 16384),
    ),
    "qwen2.5vl_merger": _QWEN25,
    "exaone4_5": replace(
        _QWEN25,
        models={"exaone4": "Exaone4_5_ForConditionalGeneration"},
        is_shared=True,
        text_types={"Exaone4ForCausalLM": "exaone4"},
        limits=(56 * 56, 28 * 28 * 1280),
    ),
    "qwen3vl_merger": VisionFamily(
        models={
            "qwen3vl": "Qwen3VLForConditionalGeneration",
            "qwen3vlmoe": "Qwen3VLMoeForConditionalGeneration",
            "qwen35": "Qwen3_5ForConditionalGeneration",
            "qwen35moe": "Qwen3_5MoeForConditionalGeneration",
        },
        whole={
            "v.patch_embd": "patch_embed.proj",
            "v.position_embd": "pos_embed",
            "v.post_ln": "merger.norm",
            "mm.0": "merger.linear_fc1",
            "mm.2": "merger.linear_fc2",
        },
        block={**_BLOCK, "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
        activation="gelu_pytorch_tanh",
        uses=frozenset({"gelu"}),
        limits=(256 * 256, 4096 * 4096),
        is_interleaved=True,
    ),
    "gemma3": VisionFamily(
        models={"gemma3": "Gemma3ForConditionalGeneration"},
        whole={
            "v.patch_embd": f"{_TOWER}.embeddings.patch_embedding",
            "v.position_embd": f"{_TOWER}.embeddings.position_embedding",
            "v.post_ln": f"{_TOWER}.post_layernorm",
            "mm.soft_emb_norm": f"{_PROJECTOR}.mm_soft_emb_norm",
            "mm.input_projection": f"{_PROJECTOR}.mm_input_projection_weight",
        },
        block=_SIGLIP_BLOCK,
        activation="gelu_pytorch_tanh",
        uses=frozenset({"gelu"}),
        has_frames=False,
        prefix="",
        blocks=f"{_TOWER}.encoder.layers",
        offset_norms=frozenset({"mm.soft_emb_norm"}),
        output="mm.input_projection.weight",
        placeholder="<image_soft_token>",
        stand_in=r"<unused\d+>",
    ),
    "gemma4v": VisionFamily(
        models={"gemma4": "Gemma4ForConditionalGeneration"},
        whole={
            "v.patch_embd": f"model.{_TOWER}.patch_embedder.input_proj",
            "v.position_embd": f"model.{_TOWER}.patch_embedder.position_embedding_table",
            "v.std_bias": f"model.{_TOWER}.std_bias",
            "v.std_scale": f"model.{_TOWER}.std_scale",
            "mm.input_projection": "model.embed_vision.embedding_projection",
        },
        block={
            "ln1": "input_layernorm",
            "attn_q": f"self_attn.q_proj{LINEAR}",
            "attn_k": f"self_attn.k_proj{LINEAR}",
            "attn_v": f"self_attn.v_proj{LINEAR}",
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "attn_out": f"self_attn.o_proj{LINEAR}",
            "attn_post_norm": "post_attention_layernorm",
            "ln2": "pre_feedforward_layernorm",
            "ffn_gate": f"mlp.gate_proj{LINEAR}",
            "ffn_up": f"mlp.up_proj{LINEAR}",
            "ffn_down": f"mlp.down_proj{LINEAR}",
            "ffn_post_norm": "post_feedforward_layernorm",
        },
        activation="gelu_pytorch_tanh",
        uses=frozenset(),
        is_gated=True,
        has_frames=False,
        prefix="",
        blocks=f"model.{_TOWER}.encoder.layers",
        placeholder="<|image|>",
        bare=frozenset({"v.position_embd", "v.std_bias", "v.std_scale"}),
        colours_last="v.patch_embd",
        has_patch_bias=False,
        others=r"(a|mm\.a)\..*",
    ),
    "idefics3": VisionFamily(
        models={"llama": "Idefics3ForConditionalGeneration"},
        is_shared=True,
        whole={
            "v.patch_embd": "vision_model.embeddings.patch_embedding",
            "v.position_embd": "vision_model.embeddings.position_embedding",
            "v.post_ln": "vision_model.post_layernorm",
            "mm.model.fc": "connector.modality_projection.proj",
        },
        block=_SIGLIP_BLOCK,
        activation="gelu_pytorch_tanh",
        uses=frozenset({"gelu"}),
        # The converter writes the second one where config.json leaves the entry out, as SmolVLM's files do.
        eps=(1e-6, 1e-5),
        has_frames=False,
        prefix="model.",
        blocks="vision_model.encoder.layers",
        placeholder="<image>",
    ),
    "lfm2": VisionFamily(
        models=dict.fromkeys(("lfm2", "lfm2moe"), "Lfm2VlForConditionalGeneration"),
        is_shared=True,
        text_types={"Lfm2ForCausalLM": "lfm2", "Lfm2MoeForCausalLM": "lfm2_moe"},
        whole={
            "v.patch_embd": f"{_TOWER}.embeddings.patch_embedding",
            "v.position_embd": f"{_TOWER}.embeddings.position_embedding",
            "v.post_ln": f"{_TOWER}.post_layernorm",
            "mm.input_norm": f"{_PROJECTOR}.layer_norm",
            "mm.1": f"{_PROJECTOR}.linear_1",
            "mm.2": f"{_PROJECTOR}.linear_2",
        },
        block=_SIGLIP_BLOCK,
        activation="gelu_pytorch_tanh",
        uses=frozenset({"gelu"}),
        has_frames=False,
        prefix="model.",
        blocks=f"{_TOWER}.encoder.layers",
        colours_last="v.patch_embd",
        placeholder="<image>",
    ),
    "pixtral": _PIXTRAL,
    "lightonocr": _LIGHTON,
    "glm4v": VisionFamily(
        # GLM-OCR has the first one, too, and another encoder.
        models={"glm4": "Glm4vForConditionalGeneration", "glm4moe": "Glm4vMoeForConditionalGeneration"},
        is_shared=True,
        whole={
            "v.norm_embd": "post_conv_layernorm",
            "v.position_embd": "embeddings.position_embedding",
            "v.post_ln": "post_layernorm",
            "mm.patch_merger": "downsample",
            "mm.model.fc": "merger.proj",
            "mm.post_norm": "merger.post_projection_norm",
            "mm.gate": "merger.gate_proj",
            "mm.up": "merger.up_proj",
            "mm.down": "merger.down_proj",
            "v.patch_embd": "patch_embed.proj",
        },
        block={
            **_BLOCK,
            "attn_q_norm": "attn.q_norm",
            "attn_k_norm": "attn.k_norm",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        },
        activation="silu",
        uses=frozenset({"silu"}),
        limits=(28 * 28 * 8, 28 * 28 * 6144),
        eps=(1e-5,),
        is_gated=True,
        placeholder="<|image|>",
    ),
    "internvl": VisionFamily(
        models=dict.fromkeys(("qwen2", "qwen3", "qwen3moe", "llama"), "InternVLForConditionalGeneration"),
        is_shared=True,
        text_types={
            "Qwen2ForCausalLM": "qwen2",
            "Qwen3ForCausalLM": "qwen3",
            "Qwen3MoeForCausalLM": "qwen3_moe",
            "LlamaForCausalLM": "llama",
        },
        whole={
            "v.patch_embd": f"{_TOWER}.embeddings.patch_embeddings.projection",
            "v.class_embd": f"{_TOWER}.embeddings.cls_token",
            "v.position_embd": f"{_TOWER}.embeddings.position_embeddings",
            "mm.model.mlp.0": f"{_PROJECTOR}.layer_norm",
            "mm.model.mlp.1": f"{_PROJECTOR}.linear_1",
            "mm.model.mlp.3": f"{_PROJECTOR}.linear_2",
        },
        block={
            "ln1": "layernorm_before",
            "ln2": "layernorm_after",
            "ls1": "lambda_1",
            "ls2": "lambda_2",
            "attn_q": "attention.q_proj",
            "attn_k": "attention.k_proj",
            "attn_v": "attention.v_proj",
            "attn_q_norm": "attention.q_norm",
            "attn_k_norm": "attention.k_norm",
            "attn_out": "attention.projection_layer",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        activation="gelu",
        uses=frozenset({"gelu"}),
        has_frames=False,
        prefix="",
        blocks=f"{_TOWER}.encoder.layer",
        bare=frozenset({"v.class_embd", "v.position_embd", "ls1", "ls2"}),
        placeholder="<IMG_CONTEXT>",
    ),
    "minicpmv4_6": VisionFamily(
        models={"qwen35": "MiniCPMV4_6ForConditionalGeneration"},
        text_types={"Qwen3_5ForCausalLM": "qwen3_5_text"},
        whole={
            "v.patch_embd": f"{_TOWER}.embeddings.patch_embedding",
            "v.position_embd": f"{_TOWER}.embeddings.position_embedding",
            "v.post_ln": f"{_TOWER}.post_layernorm",
            **{f"v.vit_merger.{name}": f"{_TOWER}.vit_merger.{theirs}" for name, theirs in _WINDOW_MERGER.items()},
            "mm.input_norm": "merger.mlp.0.pre_norm",
            "mm.up": "merger.mlp.0.linear_1",
            "mm.down": "merger.mlp.0.linear_2",
        },
        block=_SIGLIP_BLOCK,
        activation="gelu_pytorch_tanh",
        uses=frozenset({"gelu"}),
        has_frames=False,
        prefix="model.",
        blocks=f"{_TOWER}.encoder.layers",
    ),
}
DEEPSTACK: Final = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
TEXT_KINDS: Final = frozenset(kind for family in FAMILIES.values() for kind in family.models)
"""general.architecture of text parts that can read images with a vision file."""
SEEING_KINDS: Final = frozenset(kind for family in FAMILIES.values() if not family.is_shared for kind in family.models)
"""Those of them that say by themselves that the model reads images."""
