"""Errors name tensors that are missing, superfluous or misshapen, and entries that are not implemented."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewick.config import EngineConfig
from pagewick.engine.model_loading import load_model
from pagewick.errors import ModelLoadError
from pagewick.models.registry import ARCHITECTURES, read_config
from pagewick.parallel.collectives import Collectives
from pagewick.weights.tensor_headers import file_tensors
from pagewick.weights.transposed import transposed_names
from tests.deep import IS_DEEP
from tests.models.captions import CAPTIONERS, write_captioner
from tests.models.checkpoints import VARIANTS, write_checkpoint
from tests.models.encoders import VARIANT_OF_ENCODER, write_encoder

# One variant of each architecture, with as many kinds of tensors as it has.
VARIANT_OF = {
    "LlamaForCausalLM": "llama",
    "HfMoondream": "moondream",
    "LlavaForConditionalGeneration": "llava-1.5",
    "LlavaNextForConditionalGeneration": "llava-next",
    "LlavaOnevisionForConditionalGeneration": "llava-onevision",
    "Idefics3ForConditionalGeneration": "idefics3",
    "SmolVLMForConditionalGeneration": "smolvlm",
    "Llama4ForCausalLM": "llama4-scout",
    "Llama4ForConditionalGeneration": "llama4-maverick",
    "MistralForCausalLM": "mistral-v0.1",
    "Mistral3ForConditionalGeneration": "mistral-small-3.1",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2-moe-dense-layers",
    "Qwen3ForCausalLM": "qwen3",
    "LightOnOcrForConditionalGeneration": "lighton-ocr",
    "Qwen3MoeForCausalLM": "qwen3-moe",
    "InternVLForConditionalGeneration": "internvl",
    "Qwen3NextForCausalLM": "qwen3-next-dense-layers",
    "Qwen3_5ForCausalLM": "qwen3.5",
    "BambaForCausalLM": "bamba",
    "JambaForCausalLM": "jamba",
    "MambaForCausalLM": "mamba-1",
    "FalconMambaForCausalLM": "falcon-mamba",
    "Mamba2ForCausalLM": "mamba-2",
    "NemotronHForCausalLM": "nemotron-3",
    "FalconH1ForCausalLM": "falcon-h1-norm",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2-moe",
    "Lfm2VlForConditionalGeneration": "lfm2-vl",
    "Lfm3ForCausalLM": "lfm3",
    "Lfm3VlForConditionalGeneration": "lfm3-vl",
    "MiniCPMV4_6ForConditionalGeneration": "minicpm-v-4.6",
    "MiniCPMV4_7ForConditionalGeneration": "minicpm-v-4.7",
    "Qwen3_5MoeForCausalLM": "qwen3.5-moe",
    "Qwen3_5ForConditionalGeneration": "qwen3.5-multimodal",
    "Qwen3_5MoeForConditionalGeneration": "qwen3.5-moe-multimodal",
    "Qwen4ExpForCausalLM": "qwen4",
    "Qwen4ExpForConditionalGeneration": "qwen4-multimodal",
    "PhiForCausalLM": "phi-gqa-qk-layernorm",
    "Phi3ForCausalLM": "phi-3-mini-4k",
    "PhimoeForCausalLM": "phi-3.5-moe",
    "StableLmForCausalLM": "stablelm-qk-layernorm",
    "GemmaForCausalLM": "gemma-2b",
    "Gemma2ForCausalLM": "gemma-2",
    "VaultGemmaForCausalLM": "vaultgemma",
    "Gemma3ForCausalLM": "gemma-3-pattern",
    "Gemma3ForConditionalGeneration": "gemma-3-multimodal",
    "Gemma3nForCausalLM": "gemma-3n",
    "Gemma3nForConditionalGeneration": "gemma-3n",
    "Gemma4ForCausalLM": "gemma-4-26b-a4b",
    "Gemma4ForConditionalGeneration": "gemma-4-multimodal",
    "Gemma4UnifiedForCausalLM": "gemma-4-12b",
    "Gemma4UnifiedForConditionalGeneration": "gemma-4-12b-multimodal",
    "GlmForCausalLM": "glm-4-9b-chat",
    "Glm4ForCausalLM": "glm-4-0414",
    "Glm4vForConditionalGeneration": "glm-4.1v",
    "Glm46VForConditionalGeneration": "glm-4.6v",
    "Glm4vMoeForConditionalGeneration": "glm-4.5v",
    "GlmOcrForConditionalGeneration": "glm-ocr",
    "Glm4MoeForCausalLM": "glm-4.5",
    "Glm4MoeLiteForCausalLM": "glm-4.7-flash",
    "MinistralForCausalLM": "ministral-8b",
    "Ministral3ForCausalLM": "ministral-3",
    "Mistral4ForCausalLM": "mistral-4",
    "MistralLarge4ForConditionalGeneration": "mistral-large-4",
    "Qwen2VLForConditionalGeneration": "qwen2-vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2.5-vl-window",
    "Qwen3VLForConditionalGeneration": "qwen3-vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3-vl-moe",
    "HyperCLOVAXForCausalLM": "hyperclova-x",
    "GraniteMoeForCausalLM": "granite-moe",
    "GraniteMoeSharedForCausalLM": "granite-moe-shared",
    "GraniteMoeHybridForCausalLM": "granite-4",
    "GraniteSWAForCausalLM": "granite-swash",
    "GraniteMoeSWAForCausalLM": "granite-swash-moe",
    "CohereForCausalLM": "command-r-plus",
    "Cohere2ForCausalLM": "command-r7b",
    "Cohere2VisionForConditionalGeneration": "command-a-vision",
    "Cohere2MoeForCausalLM": "command-a-plus",
    "KimiLinearForCausalLM": "kimi-linear",
    "BailingHybridForCausalLM": "ling-3-flash",
    "BailingMoeV3ForCausalLM": "ling-3-flash",
    "MiniMaxM2ForCausalLM": "minimax-m2",
    "MiniMaxM3SparseForConditionalGeneration": "minimax-m3",
    "SmolLM3ForCausalLM": "smollm3",
    "SeedOssForCausalLM": "seed-oss",
    "OlmoForCausalLM": "olmo-0424",
    "Olmo2ForCausalLM": "olmo-2",
    "Olmo3ForCausalLM": "olmo-3",
    "OlmoHybridForCausalLM": "olmo-hybrid",
    "OlmoeForCausalLM": "olmoe",
    "FlexOlmoForCausalLM": "flex-olmo",
    "Ernie4_5ForCausalLM": "ernie-4.5",
    "Ernie4_5_MoeForCausalLM": "ernie-4.5-moe",
    "Exaone4ForCausalLM": "exaone-4-32b",
    "PaddleOCRVLForConditionalGeneration": "paddleocr-vl",
    "Exaone4_5_ForConditionalGeneration": "exaone-4.5",
    "DeepseekV2ForCausalLM": "deepseek-v2",
    "DeepseekV3ForCausalLM": "deepseek-v3",
    "KimiK25ForConditionalGeneration": "kimi-k2.5",
    "Kimi_K25ForConditionalGeneration": "kimi-k2.5",
    "DeepseekV32ForCausalLM": "deepseek-v3.2",
    "DeepseekV4ForCausalLM": "deepseek-v4",
    "GlmMoeDsaForCausalLM": "glm-5.2",
    "GPT2ForCausalLM": "gpt2",
    "AXK1ForCausalLM": "a.x-k1",
    "AXK2ForCausalLM": "a.x-k2",
    "LongcatFlashForCausalLM": "longcat-flash",
    "YoutuForCausalLM": "youtu",
    "MiniCPM3ForCausalLM": "minicpm3",
    "FalconForCausalLM": "falcon-40b",
    "OPTForCausalLM": "opt",
    "GPTNeoXForCausalLM": "pythia",
    "GPTBigCodeForCausalLM": "starcoder",
    "Starcoder2ForCausalLM": "starcoder2-3b",
    "GraniteForCausalLM": "granite-untied-bias",
    "GptOssForCausalLM": "gpt-oss",
    "HunYuanDenseV1ForCausalLM": "hunyuan-tied",
    "HunYuanMoEV1ForCausalLM": "hunyuan-a13b",
    "HYV3ForCausalLM": "hy3",
    "HYV4ForCausalLM": "hy4",
    "MellumForCausalLM": "mellum-2",
    "LagunaForCausalLM": "laguna-xs",
    "FlintForCausalLM": "flint",
    "Step3p7ForConditionalGeneration": "step-3.7",
    "MiMoV2FlashForCausalLM": "mimo-v2-flash",
    "Dots1ForCausalLM": "dots.llm1",
    "ArceeForCausalLM": "arcee",
    "ApertusForCausalLM": "apertus",
    "AfmoeForCausalLM": "trinity-mini",
    "ExaoneMoeForCausalLM": "k-exaone",
    "SolarOpenForCausalLM": "solar-open",
    "InternLM3ForCausalLM": "internlm3-bias",
    "IQuestCoderForCausalLM": "iquest-coder",
    "CwmForCausalLM": "cwm",
    "HeliumForCausalLM": "helium",
    "NemotronForCausalLM": "nemotron",
    "NanoChatForCausalLM": "nanochat",
    "Jais2ForCausalLM": "jais-2",
}
# Parts that are not loaded.
OTHER_PARTS = re.compile(
    r"vision_|embed_vision|multi_modal|mm_projector|connector|vit_large|model\.merger|patch_merger"
)
CPU = torch.device("cpu")


def load(directory: Path) -> None:
    load_model(EngineConfig(model=str(directory), dtype="float32", device="cpu"), Collectives.single(), CPU)


def kinds(names: list[str]) -> list[str]:
    """Return the last name of each kind of tensor; names that differ only in numbers are of one kind."""
    return list({re.sub(r"\d+", "*", name): name for name in names}.values())


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Variant -> the directory of its checkpoint, which no test changes."""

    @functools.cache
    def directory_of(variant: str) -> Path:
        directory = tmp_path_factory.mktemp("checkpoint")
        write_checkpoint(variant, directory)
        return directory

    return directory_of


@pytest.fixture(scope="module")
def tried() -> set[str]:
    """The names within a layer of the tensors that were wrong in the architectures so far."""
    return set()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_tensor_is_named_if_it_is_wrong(
    architecture: str, tmp_path: Path, stored: Callable[[str], Path], tried: set[str]
) -> None:
    """A tensor is missing or has another shape, in the first architecture that has one of its name within a layer.

    In each architecture at least one is missing and one misshapen; PAGEWICK_DEEP=1 does both to all of them.
    """
    if architecture in VARIANT_OF:
        shutil.copytree(stored(VARIANT_OF[architecture]), tmp_path, dirs_exist_ok=True)
    elif architecture in CAPTIONERS:
        write_captioner(tmp_path)
    else:
        task = "ForSequenceClassification" if architecture.endswith("ForSequenceClassification") else "Model"
        write_encoder(VARIANT_OF_ENCODER[architecture], tmp_path, task)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    load(tmp_path)
    ignored = read_config(json.loads((tmp_path / "config.json").read_text())).ignored
    used = [name for name in tensors if not any(re.fullmatch(pattern, name) for pattern in ignored)]
    wanted = [name for name in kinds(used) if not OTHER_PARTS.search(name)]
    if architecture.endswith("Model"):
        # An encoder without a head of labels does not read its pooler.
        wanted = [name for name in wanted if not name.startswith("pooler.")]
    assert len(wanted) > 8
    lying = transposed_names(json.loads((tmp_path / "config.json").read_text()), file_tensors(file))

    def check(changed: dict[str, torch.Tensor], *said: str) -> None:
        save_file(changed, file)
        with pytest.raises(ModelLoadError) as caught:
            load(tmp_path)
        for words in said:
            assert words in str(caught.value)

    place = [*ARCHITECTURES].index(architecture)
    for number, name in enumerate(wanted):
        within = ".".join(part for part in name.split(".")[-3:] if not part.isdigit())
        is_new = within not in tried
        tried.add(within)
        if IS_DEEP or is_new or (number - place) % len(wanted) == 0:
            check({key: value for key, value in tensors.items() if key != name}, "lacks 1 tensor of", name)
        if IS_DEEP or is_new or (number - place) % len(wanted) == len(wanted) // 2:
            shape = list(tensors[name].shape)
            wrong = list(shape) or [1]
            wrong[number // 2 % len(wrong)] += 1
            step = -1 if name in lying else 1
            said = str(wrong[::step]), str(shape[::step])
            check({**tensors, name: torch.zeros(wrong)}, f"cannot load {name}", *said)
    extra = wanted[-1].replace("weight", "scales").replace("bias", "scales")
    check({**tensors, extra: torch.zeros(2)}, "no place for 1 tensor:", extra)


TIED = {
    "llama-bias-tied": "lm_head.weight",
    "gemma-2b": "lm_head.weight",
    "gemma-3-multimodal": "language_model.lm_head.weight",
    "starcoder": "lm_head.weight",
}


@pytest.mark.parametrize("variant", TIED)
def test_a_stored_head_that_is_tied_must_be_the_embedding(variant: str, tmp_path: Path) -> None:
    """transformers does not tie a head that differs."""
    write_checkpoint(variant, tmp_path)
    file, head = tmp_path / "model.safetensors", TIED[variant]
    tensors = load_file(file)
    (embedding,) = (name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight")))
    stored = tensors[embedding].clone()
    save_file({**tensors, head: stored}, file)
    load(tmp_path)
    stored[-1, -1] += 1
    save_file({**tensors, head: stored}, file)
    with pytest.raises(ModelLoadError, match=rf"{head} differs from {embedding}\n  set tie_word_embeddings to false"):
        load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    load(tmp_path)


STEP = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 48}
LARGE_4 = VARIANTS["mistral-large-4"].entries["text_config"]
# Refused configs: variant, changes of its config.json, words of the message.
REFUSED: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("llama", {"architectures": ["LlamaForCasualLM"]}, ("LlamaForCasualLM", "nearest that is: LlamaForCausalLM")),
    ("llama", {"architectures": ["BloomForCausalLM"]}, ("BloomForCausalLM is not supported", "models supported")),
    ("llama", {"architectures": ["Phi3SmallForCausalLM"]}, ("Phi3SmallForCausalLM is not supported", "block-sparse")),
    ("llama", {"hidden_act": "mish"}, ("hidden_act", "mish", "silu")),
    ("llama", {"rope_parameters": {"rope_type": "proportional", "factor": 2.0}}, ("proportional", "yarn")),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "new_entry": 3}}, ("new_entry",)),
    ("llama", {"num_key_value_heads": 4}, ("num_key_value_heads", "divisor")),
    ("qwen2", {"use_mrope": True}, ("use_mrope",)),
    ("qwen2-window", {"layer_types": ["full_attention", "linear_attention"] * 2}, ("layer_types", "linear_attention")),
    ("qwen2-window", {"layer_types": ["full_attention"]}, ("layer_types", "num_hidden_layers")),
    ("mixtral", {"num_experts_per_tok": 8}, ("num_experts_per_tok",)),
    ("llama4-scout", {"layer_types": ["sliding_attention"] * 4}, ("layer_types", "chunked_attention")),
    ("llama4-scout", {"moe_layers": [0, 4]}, ("moe_layers", "num_hidden_layers (4)")),
    ("llama4-scout", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, ("use_qk_norm", "yarn")),
    ("phi-1", {"tie_word_embeddings": True}, ("tie_word_embeddings",)),
    ("phi-1", {"hidden_act": "laplace"}, ("hidden_act", "laplace")),
    ("phi-3.5-mini-long", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
     ("short_factor", "8")),
    ("phi-3.5-moe", {"num_experts_per_tok": 3}, ("num_experts_per_tok", "two for a token")),
    ("phi-3.5-moe", {"tie_word_embeddings": True}, ("tie_word_embeddings", "no bias")),
    ("phi-3.5-moe", {"rope_parameters": {"rope_type": "longrope", "short_mscale": 1.2, "long_mscale": 1.3}},
     ("rope_parameters.long_mscale", "another factor than short_mscale")),
    ("gemma-2", {"use_bidirectional_attention": True}, ("use_bidirectional_attention",)),
    ("gemma-3-1b", {"attn_logit_softcapping": 30.0}, ("attn_logit_softcapping",)),
    ("deepseek-v2", {"topk_method": "best"}, ("topk_method", "best", "group_limited_greedy")),
    ("deepseek-v2", {"qk_rope_head_dim": 7}, ("qk_rope_head_dim", "an even number")),
    ("kimi-linear", {"qk_rope_head_dim": 7}, ("qk_rope_head_dim", "an even number")),
    ("deepseek-v2", {"n_group": 5}, ("12 experts do not make 5 equal groups",)),
    ("deepseek-v2", {"norm_topk_prob": True}, ("norm_topk_prob",)),
    ("deepseek-v3", {"scoring_func": "softmax"}, ("scoring_func", "softmax", "sigmoid")),
    ("deepseek-v3", {"moe_layer_freq": 2}, ("moe_layer_freq",)),
    ("deepseek-v3.2", {"index_topk": 0}, ("index_topk", "a whole number from 1")),
    ("deepseek-v3.2", {"index_head_dim": 6}, ("index_head_dim", "at least qk_rope_head_dim (8)")),
    ("deepseek-v3.2", {"indexer_rope_interleave": True}, ("indexer_rope_interleave", "False")),
    ("deepseek-v3.2", {"q_lora_rank": None}, ("q_lora_rank",)),
    ("deepseek-v3.2", {"layer_types": ["full_attention"] * 3}, ("layer_types",)),
    ("qwen4", {"indexer_kv_heads": 2}, ("indexer_kv_heads", "1")),
    ("qwen4", {"indexer_budget": None}, ("indexer_budget is missing",)),
    ("qwen4", {"indexer_budget": 10}, ("indexer_budget", "a multiple of indexer_compress_ratio (4)")),
    ("qwen4", {"indexer_head_dim": 6}, ("indexer_head_dim", "at least the 8 numbers of a head that rotate")),
    ("qwen4", {"output_gate_type": "gelu"}, ("output_gate_type", "sigmoid, silu")),
    ("qwen4", {"hc_count": 1}, ("hc_count", "above 1")),
    ("qwen4", {"ple_layer_ids": [4]}, ("ple_layer_ids", "layers with linear attention")),
    ("qwen4", {"ple_layer_ids": [5]}, ("ple_layer_ids", "numbers from 1 to 4")),
    ("qwen4", {"ple_embed_dim": 25}, ("ple_embed_dim", "(ngram_size - 1) * heads_per_ngram (4)")),
    ("qwen4", {"eos_token_id": None}, ("eos_token_id is missing",)),
    ("qwen4", {"eos_token_id": ["</s>"]}, ("eos_token_id",)),
    ("qwen4", {"layer_types": ["linear_attention"] * 4}, ("layer_types", "not all linear_attention")),
    ("qwen4", {"layer_types": None, "full_attention_interval": 5}, ("full_attention_interval",)),
    ("deepseek-v4", {"scoring_func": "sigmoid"}, ("scoring_func", "sqrtsoftplus")),
    ("deepseek-v4", {"swiglu_limit": 7.0}, ("swiglu_limit", "10.0")),
    ("deepseek-v4", {"n_shared_experts": 2}, ("n_shared_experts",)),
    ("deepseek-v4", {"num_key_value_heads": 2}, ("num_key_value_heads",)),
    ("deepseek-v4", {"o_groups": 4}, ("o_groups", "a divisor of num_attention_heads (6)")),
    ("deepseek-v4", {"head_dim": 25}, ("head_dim", "an even number")),
    ("deepseek-v4", {"index_head_dim": 6}, ("index_head_dim", "at least the 8 values that rotate")),
    ("deepseek-v4", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, ("layer_types",)),
    ("deepseek-v4", {"layer_types": None, "compress_ratios": [0, 4, 8]}, ("compress_ratios", "0, 4 or 128")),
    ("deepseek-v4", {"mlp_layer_types": ["moe"]}, ("mlp_layer_types", "num_hidden_layers (3)")),
    ("deepseek-v4", {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2}},
     ("attention_factor of 1.2",)),
    ("glm-5.2", {"indexer_types": ["shared", "full", "full"]}, ("indexer_types", "begins with full")),
    ("glm-5.2", {"indexer_types": ["full", "shared"]}, ("indexer_types", "num_hidden_layers (3)")),
    ("glm-5.2", {"indexer_types": None, "index_topk_pattern": "FSF"}, ("index_topk_pattern", "indexer_types")),
    ("glm-5.2", {"rope_interleave": False}, ("rope_interleave",)),
    ("mistral-large-4", {"text_config": {**LARGE_4, "q_lora_rank": 20}}, ("text_config.q_lora_rank", "one matrix")),
    ("mistral-large-4", {"text_config": {**LARGE_4, "norm_topk_prob": False}}, ("norm_topk_prob",)),
    ("mistral-large-4", {"text_config": {**LARGE_4, "model_type": "mistral4"}}, ("model_type", "mistral_large4_text")),
    ("mistral-large-4", {"text_config": {**LARGE_4, "kv_source_layers": [0, 1]}}, ("kv_source_layers", "(4)")),
    ("mistral-large-4", {"text_config": {**LARGE_4, "kv_source_layers": [0, 1, 1, 1]}}, ("layer 2", "rotates")),
    ("mistral-large-4", {"text_config": {**LARGE_4, "kv_source_layers": [0, 1, 2, 2]}}, ("layer 3", "its own")),
    ("mistral-large-4", {"text_config": {**LARGE_4, "kv_source_layers": [0, 3, 0, 3]}}, ("layer 1", "before it")),
    ("mistral-large-4", {"text_config": {**LARGE_4, "no_rope_layers": [1, 0]}}, ("no_rope_layers", "(4)")),
    ("mistral-large-4", {"vision_feature_layer": -2}, ("vision_feature_layer",)),
    ("gemma-3n", {"use_bidirectional_attention": True}, ("use_bidirectional_attention",)),
    ("gemma-3n", {"altup_active_idx": 1}, ("altup_active_idx", "first stream")),
    ("gemma-3n", {"altup_correct_scale": False}, ("altup_correct_scale",)),
    ("gemma-3n", {"altup_num_inputs": 1}, ("altup_num_inputs", "at least 2")),
    ("gemma-3n", {"intermediate_size": [72]}, ("intermediate_size", "num_hidden_layers (5)")),
    ("gemma-3n", {"activation_sparsity_pattern": [0.5] * 4 + [1.0]}, ("activation_sparsity_pattern", "below 1")),
    ("gemma-3n", {"num_kv_shared_layers": 4}, ("num_kv_shared_layers", "each kind")),
    ("gemma-4-e2b", {"use_bidirectional_attention": "all"}, ("use_bidirectional_attention", "all")),
    ("gemma-4-e2b", {"num_kv_shared_layers": 4}, ("num_kv_shared_layers", "each kind")),
    ("gemma-4-e2b", {"vocab_size_per_layer_input": 100}, ("vocab_size_per_layer_input",)),
    ("gemma-4-e2b", {"per_layer_config": {"3": {"sliding_window": 9}}}, ("per_layer_config.3.sliding_window",)),
    ("gemma-4-e2b", {"layer_types": ["sliding_attention"] * 5}, ("layer_types", "sees everything")),
    ("gemma-4-26b-a4b", {"top_k_experts": 9}, ("top_k 9 experts",)),
    ("gpt-oss", {"swiglu_limit": 10.0}, ("swiglu_limit", "10.0")),
    ("gpt-oss", {"swiglu_alpha": 1.5}, ("swiglu_alpha", "1.5")),
    ("gpt-oss", {"hidden_act": "gelu"}, ("hidden_act", "gelu")),
    ("glm-4.5", {"scoring_func": "softmax"}, ("scoring_func", "softmax", "sigmoid")),
    ("glm-4.5", {"n_group": 5}, ("12 experts do not make 5 equal groups",)),
    ("glm-4.7-flash", {"mlp_layer_types": ["dense"]}, ("mlp_layer_types", "num_hidden_layers (3)")),
    ("glm-4.7-flash", {"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "qk_rope_head_dim")),
    ("mistral-small-3.1", {"text_config": {"model_type": "llama"}}, ("text_config.model_type", "ministral3")),
    ("ministral-3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, ("llama_4_scaling_beta",)),
    ("ministral-3", {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": -0.1}}, ("from 0",)),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1}},
     ("llama_4_scaling_beta", "left out")),
    ("qwen2", {"rope_parameters": {"rope_type": "mrope", "mrope_section": [2, 3, 3]}}, ("mrope", "yarn")),
    ("command-r7b", {"use_qk_norm": True}, ("use_qk_norm",)),
    ("command-a-plus", {"use_parallel_block": False}, ("use_parallel_block",)),
    ("command-a-plus", {"expert_selection_fn": "relu"}, ("expert_selection_fn", "sigmoid, softmax")),
    ("minimax-m2", {"attn_type_list": [1, 0, 1]}, ("attn_type_list", "linear attention")),
    ("minimax-m2", {"qk_norm_type": "per_head"}, ("qk_norm_type", "per_layer")),
    ("minimax-m2", {"shared_intermediate_size": 64}, ("shared_intermediate_size",)),
    ("minimax-m2", {"rotary_dim": 17}, ("rotary_dim", "from 1 to 16")),
    ("smollm3", {"no_rope_layers": [1, 2, 1, 0]}, ("no_rope_layers", "num_hidden_layers (4) times 0 or 1")),
    ("olmoe", {"clip_qkv": 8.0}, ("clip_qkv",)),
    ("olmo-3", {"layer_types": ["full_attention"]}, ("layer_types", "num_hidden_layers")),
    ("kimi-linear", {"mla_use_output_gate": True}, ("mla_use_output_gate", "False")),
    ("kimi-linear", {"linear_attn_config": {"gate_lower_bound": -5.0}}, ("linear_attn_config.gate_lower_bound",)),
    ("kimi-linear", {"layer_types": ["linear_attention"] * 4}, ("layer_types", "at least one")),
    ("kimi-linear", {"layer_types": None, "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [3]}},
     ("linear_attn_config.kda_layers", "from 1 to 4")),
    ("ling-3-flash", {"kda_lower_bound": 0.5}, ("kda_lower_bound", "below 0")),
    ("ling-3-flash", {"kda_lower_bound": None}, ("kda_lower_bound",)),
    ("ling-3-flash", {"no_kda_lora": False}, ("no_kda_lora", "True")),
    ("ling-3-flash", {"use_mla_nope": True}, ("use_mla_nope", "False")),
    ("ling-3-flash", {"gated_attention_proj_granularity_type": "element_wise"}, ("element_wise", "head_wise")),
    ("ling-3-flash", {"layer_types": None, "layer_group_size": 3}, ("layer_group_size", "num_hidden_layers (4)")),
    ("ling-3-flash", {"partial_rotary_factor": 0.25}, ("partial_rotary_factor", "0.5, 1.0")),
    ("ling-3-flash", {"rotary_dim": 4}, ("rotary_dim", "8")),
    ("ling-3-flash", {"expert_swiglu_limit_list": [0, 0, 4, 6]}, ("expert_swiglu_limit_list", "0, 4, 5, 7, 16")),
    ("ling-3-flash", {"share_expert_swiglu_limit_list": [5, 0, 0, 0]}, ("share_expert_swiglu", "without experts")),
    ("ling-3-flash", {"moe_shared_expert_intermediate_size": 48}, ("moe_shared_expert_intermediate_size", "24")),
    ("olmo-hybrid", {"linear_num_value_heads": 12}, ("linear_num_value_heads", "linear_num_key_heads (6)")),
    ("olmo-hybrid", {"layer_types": ["linear_attention"] * 4}, ("layer_types", "at least one")),
    ("ernie-4.5-moe", {"use_bias": True}, ("use_bias", "experts have no biases")),
    ("ernie-4.5-moe", {"moe_norm_min": 0.1}, ("moe_norm_min",)),
    ("granite-4-h", {"time_step_limit": [0.0, 100.0]}, ("time_step_limit", "limits of steps are not supported")),
    ("granite-4-h", {"layer_types": ["mamba"] * 4}, ("layer_types", "at least one")),
    ("granite-4-h", {"mamba_d_head": 8}, ("mamba_d_head", '"auto" or 16')),
    ("granite-4-h", {"mamba_d_conv": 1}, ("mamba_d_conv", "above 1")),
    ("granite-4-h", {"mamba_n_groups": 5}, ("mamba_n_groups", "a divisor of mamba_n_heads (12)")),
    ("granite-swash", {"layer_rope_theta": [1e4] * 3}, ("layer_rope_theta", "num_hidden_layers (5)")),
    ("granite-swash", {"layer_rope_theta": [1e4] * 4 + [0.5]}, ("layer_rope_theta", "above 1")),
    ("granite-swash", {"no_rope_layers": [1] * 5}, ("no_rope_layers", "layer_rope_theta")),
    ("jamba", {"hidden_act": "gelu"}, ("hidden_act", "silu")),
    ("jamba", {"mamba_d_conv": 1}, ("mamba_d_conv", "above 1")),
    ("jamba", {"mamba_inner_layernorms": False}, ("mamba_inner_layernorms",)),
    ("jamba", {"attn_layer_offset": 3}, ("attn_layer_offset", "below attn_layer_period (3)")),
    ("jamba", {"num_experts_per_tok": 8}, ("num_experts_per_tok",)),
    ("mamba-1", {"conv_kernel": 1}, ("conv_kernel", "above 1")),
    ("mamba-1", {"hidden_act": "gelu"}, ("hidden_act", "silu")),
    ("mamba-2", {"head_dim": 8}, ("head_dim", '"auto" or 16')),
    ("mamba-2", {"hidden_act": "gelu"}, ("hidden_act", "silu")),
    ("mamba-2", {"time_step_limit": [0.0, 0.1]}, ("time_step_limit", "limits of steps are not supported")),
    ("bamba", {"attn_layer_indices": []}, ("attn_layer_indices", "a list of layers from 0 to 3")),
    ("lfm2", {"layer_types": ["conv"] * 4}, ("layer_types", "at least one")),
    ("lfm3", {"layer_types": ["conv", "mamba"] * 2}, ("layer_types", "sliding_attention")),
    ("lfm2", {"conv_L_cache": 1}, ("conv_L_cache", "above 1")),
    ("nemotron-h", {"n_groups": 5}, ("n_groups", "a divisor")),
    ("nemotron-h", {"mlp_bias": True, "layers_block_type": ["moe", "full_attention"]}, ("mlp_bias", "no biases")),
    ("nemotron-3", {"n_shared_experts": 2}, ("n_shared_experts", "the size of one")),
    ("falcon-h1", {"ssm_multipliers": [1.0, 0.0, 1.0, 1.0, 1.0]}, ("ssm_multipliers", "5 numbers above 0")),
    (
        "deepseek-v3",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale_all_dim": 1e300}},
        ("mscale_all_dim", "infinite"),
    ),
    ("falcon-h1", {"attention_in_multiplier": 1e200}, ("attention_in_multiplier", "too large")),
    ("ernie-4.5", {"compression_ratio": 2.0}, ("compression_ratio", "positions")),
    ("hunyuan-7b", {"use_cla": True}, ("use_cla",)),
    ("hunyuan-7b", {"rope_parameters": {"rope_type": "dynamic", "alpha": 5.0, "new_entry": 3}}, ("new_entry",)),
    ("hunyuan-7b", {"rope_parameters": {"rope_type": "yarn", "alpha": 5.0}}, ("rope_type", "dynamic")),
    ("hunyuan-a13b", {"moe_topk": [3, 2]}, ("moe_topk", "num_hidden_layers (3)")),
    ("hunyuan-a13b", {"moe_layer_num_skipped": 1}, ("moe_layer_num_skipped", "without experts")),
    ("hy3", {"route_norm": False}, ("route_norm",)),
    ("mellum-2", {"use_sliding_window": False}, ("use_sliding_window", "layer_types")),
    ("laguna-xs", {"num_attention_heads_per_layer": [4, 6, 8]}, ("num_attention_heads_per_layer", "num_hidden_layers")),
    ("laguna-xs", {"num_attention_heads_per_layer": [4, 6, 7, 6]}, ("num_attention_heads_per_layer", "multiples of")),
    ("laguna-xs", {"gating": False}, ("gating", "per-head")),
    ("laguna-xs", {"gating_types": ["per_element"] * 4}, ("gating_types", "per-head")),
    ("laguna-xs", {"mlp_only_layers": [0, 1]}, ("mlp_only_layers", "[0]")),
    ("laguna-xs", {"moe_router_logit_softcapping": 30.0}, ("moe_router_logit_softcapping",)),
    ("flint", {"layer_types": ["chunked_attention"] * 5}, ("layer_types", "chunked_attention")),
    ("flint", {"num_experts_per_tok": 9}, ("num_experts_per_tok",)),
    ("step-3.7", {"text_config": {**STEP, "swiglu_limits": [0, 9.0]}}, ("swiglu_limits", "0, 4, 5, 7, 16")),
    ("step-3.7", {"text_config": {**STEP, "use_rope_layers": [True, False]}}, ("use_rope_layers",)),
    ("step-3.7", {"text_config": {**STEP, "rope_theta": [1e4, 5e4]}}, ("rope_theta", "kind of layer")),
    ("step-3.7", {"text_config": {**STEP, "per_layer_config": {"1": {}}}}, ("per_layer_config",)),
    ("mimo-v2-flash", {"v_head_dim": 32}, ("v_head_dim", "24")),
    ("mimo-v2-flash", {"swa_head_dim": 16}, ("swa_head_dim", "24")),
    ("mimo-v2-flash", {"swa_num_key_value_heads": 4}, ("swa_num_key_value_heads", "a divisor")),
    ("mimo-v2-flash", {"hybrid_layer_pattern": [0, 1, 2, 0]}, ("hybrid_layer_pattern", "a list of 0 and 1")),
    ("mimo-v2-flash", {"moe_layer_freq": [1, 1, 1, 1]}, ("moe_layer_freq", "agree with mlp_layer_types")),
    ("mimo-v2-flash", {"add_full_attention_sink_bias": True}, ("add_full_attention_sink_bias",)),
    ("dots.llm1", {"scoring_func": "softmax"}, ("scoring_func", "sigmoid")),
    ("trinity-mini", {"score_func": "softmax"}, ("score_func", "sigmoid")),
    ("solar-open", {"first_k_dense_replace": 1}, ("first_k_dense_replace", "without experts")),
    ("internlm3", {"attention_bias": True}, ("attention_bias", "same as bias")),
    ("helium", {"head_dim": 12}, ("head_dim", "hidden_size / num_attention_heads")),
    ("apertus", {"qk_norm": False}, ("qk_norm",)),
    ("exaone-4-32b", {"sliding_window_pattern": "GLLL"}, ("sliding_window_pattern", "GLLL")),
    ("a.x-k2", {"q_lora_rank": None}, ("q_lora_rank",)),
    ("a.x-k2", {"gated_norm_rank": 0}, ("gated_norm_rank", "from 1")),
    ("a.x-k2", {"n_group": 4}, ("topk_group",)),
    ("a.x-k2", {"scoring_func": "softmax"}, ("scoring_func", "sigmoid")),
    ("a.x-k2", {"layer_types": ["full_attention"] * 3}, ("layer_types",)),
    ("longcat-flash", {"zero_expert_type": "copy"}, ("zero_expert_type", "identity")),
    ("longcat-flash", {"router_bias": True}, ("router_bias",)),
    ("longcat-flash", {"n_routed_experts": 10**6}, ("1000000 experts in each of",)),
    ("longcat-flash", {"zero_expert_num": 5000}, ("zero_expert_num", "from 0 to 4096")),
    ("longcat-flash", {"mla_scale_q_lora": False}, ("mla_scale_q_lora",)),
    ("longcat-flash", {"moe_topk": 13}, ("moe_topk", "from 1 to 12")),
    ("longcat-flash", {"qk_head_dim": 24}, ("qk_head_dim", "20")),
    ("longcat-flash", {"q_lora_rank": None}, ("q_lora_rank",)),
    ("youtu", {"n_routed_experts": 8}, ("n_routed_experts", "layers with experts")),
    ("youtu", {"mlp_bias": True}, ("mlp_bias",)),
    ("cwm", {"attention_bias": True}, ("attention_bias",)),
    ("cwm", {"layer_types": ["chunked_attention"] * 5}, ("layer_types", "chunked_attention")),
    ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 512}, ("do_layer_norm_before", "OPT 350M")),
    ("opt", {"word_embed_proj_dim": 512}, ("word_embed_proj_dim", "OPT 350M")),
    ("opt", {"_remove_final_layer_norm": True}, ("_remove_final_layer_norm",)),
    ("iquest-coder", {"clip_qkv": 8.0}, ("clip_qkv",)),
    ("iquest-coder", {"use_sliding_window": True}, ("use_sliding_window",)),
    ("nanochat", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ("rope_parameters", "dynamic")),
    ("falcon-7b", {"alibi": True}, ("alibi", "slopes")),
    ("falcon-7b", {"multi_query": False}, ("multi_query",)),
    ("falcon-7b", {"num_ln_in_parallel_attn": 2}, ("num_ln_in_parallel_attn",)),
    ("falcon-40b", {"parallel_attn": False}, ("parallel_attn",)),
    ("falcon-40b", {"num_kv_heads": 4}, ("num_kv_heads", "divisor")),
    ("gpt2", {"add_cross_attention": True}, ("add_cross_attention",)),
    ("starcoder", {"add_cross_attention": True}, ("add_cross_attention",)),
    ("starcoder", {"activation_function": "tanh"}, ("activation_function", "tanh")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "changes", "words"), REFUSED, ids=[f"{row[0]}-{next(iter(row[1]))}" for row in REFUSED]
)
def test_unimplemented_entries_are_refused(
    variant: str, changes: dict[str, Any], words: tuple[str, ...], stored: Callable[[str], Path]
) -> None:
    config = json.loads((stored(variant) / "config.json").read_text())
    with pytest.raises(ModelLoadError) as caught:
        read_config({**config, **changes})
    for word in words:
        assert word in str(caught.value)


def test_every_architecture_is_here() -> None:
    assert {*VARIANT_OF, *VARIANT_OF_ENCODER, *CAPTIONERS} >= set(ARCHITECTURES)
    tasks = "ForCausalLM", "ForConditionalGeneration"
    known = {f"{variant.config}{task}" for variant in VARIANTS.values() for task in tasks}
    assert known >= set(ARCHITECTURES) - VARIANT_OF_ENCODER.keys() - set(CAPTIONERS) - {
        "Gemma3ForCausalLM", "Gemma3nForCausalLM", "Gemma3nForConditionalGeneration", "Gemma4ForCausalLM",
        "Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration", "KimiK25ForConditionalGeneration",
        "MiniMaxM3SparseForConditionalGeneration",
        "BailingMoeV3ForCausalLM", "HfMoondream",
    }  # fmt: skip
