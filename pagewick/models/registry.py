"""One table: architecture name in config.json -> function that reads the file. Building a model imports torch."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.models.config import ModelConfig, architecture_of
from pagewick.models.encoding import POOLING_ENTRY, POOLINGS, as_encoder, with_dense
from pagewick.models.entries import Entries
from pagewick.models.labels import ENDING, read_label_head
from pagewick.models.reading import check_number_of_experts
from pagewick.models.rope_entries import override_rope, parse_scaling

if TYPE_CHECKING:
    from pagewick.layers.context import LayerContext
    from pagewick.models.decoder import Decoder

ARCHITECTURES: Final = {
    "LlamaForCausalLM": "pagewick.models.llama:read_llama",
    "Idefics3ForConditionalGeneration": "pagewick.models.llama:read_idefics3",
    "SmolVLMForConditionalGeneration": "pagewick.models.llama:read_idefics3",
    "Llama4ForCausalLM": "pagewick.models.llama4:read_llama4",
    "Llama4ForConditionalGeneration": "pagewick.models.llama4:read_llama4_multimodal",
    "MistralForCausalLM": "pagewick.models.mistral:read_mistral",
    "Mistral3ForConditionalGeneration": "pagewick.models.mistral:read_mistral3",
    "BlipForConditionalGeneration": "pagewick.models.blip:read_blip",
    "LlavaForConditionalGeneration": "pagewick.models.llava:read_llava",
    "LlavaOnevisionForConditionalGeneration": "pagewick.models.llava:read_llava_onevision",
    "LlavaNextForConditionalGeneration": "pagewick.models.llava:read_llava_next",
    "MinistralForCausalLM": "pagewick.models.mistral:read_ministral",
    "Ministral3ForCausalLM": "pagewick.models.mistral:read_ministral3",
    "Mistral4ForCausalLM": "pagewick.models.mistral4:read_mistral4",
    "MistralLarge4ForConditionalGeneration": "pagewick.models.mistral_large4:read_mistral_large4",
    "MixtralForCausalLM": "pagewick.models.mistral:read_mixtral",
    "Qwen2ForCausalLM": "pagewick.models.qwen:read_qwen2",
    "Qwen2MoeForCausalLM": "pagewick.models.qwen:read_qwen2_moe",
    "Qwen3ForCausalLM": "pagewick.models.qwen:read_qwen3",
    "InternVLForConditionalGeneration": "pagewick.models.internvl:read_internvl",
    "LightOnOcrForConditionalGeneration": "pagewick.models.lighton:read_lighton_ocr",
    "Qwen3MoeForCausalLM": "pagewick.models.qwen:read_qwen3_moe",
    "Qwen3NextForCausalLM": "pagewick.models.qwen_next:read_qwen3_next",
    "Qwen3_5ForCausalLM": "pagewick.models.qwen_next:read_qwen3_5",
    "Qwen3_5ForConditionalGeneration": "pagewick.models.qwen_next:read_qwen3_5_multimodal",
    "Qwen3_5MoeForCausalLM": "pagewick.models.qwen_next:read_qwen3_5_moe",
    "Qwen4ExpForCausalLM": "pagewick.models.qwen4:read_qwen4",
    "Qwen4ExpForConditionalGeneration": "pagewick.models.qwen4:read_qwen4_multimodal",
    "Qwen3_5MoeForConditionalGeneration": "pagewick.models.qwen_next:read_qwen3_5_moe_multimodal",
    "MiniCPMV4_6ForConditionalGeneration": "pagewick.models.qwen_next:read_minicpm_v4_6",
    "MiniCPMV4_7ForConditionalGeneration": "pagewick.models.qwen_next:read_minicpm_v4_7",
    "Qwen2VLForConditionalGeneration": "pagewick.models.qwen:read_qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "pagewick.models.qwen:read_qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "pagewick.models.qwen:read_qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "pagewick.models.qwen:read_qwen3_vl_moe",
    "PhiForCausalLM": "pagewick.models.phi:read_phi",
    "Phi3ForCausalLM": "pagewick.models.phi:read_phi3",
    "PhimoeForCausalLM": "pagewick.models.phi:read_phimoe",
    "StableLmForCausalLM": "pagewick.models.stablelm:read_stablelm",
    "GemmaForCausalLM": "pagewick.models.gemma:read_gemma",
    "Gemma2ForCausalLM": "pagewick.models.gemma:read_gemma2",
    "VaultGemmaForCausalLM": "pagewick.models.gemma:read_vault_gemma",
    "Gemma3ForCausalLM": "pagewick.models.gemma:read_gemma3",
    "Gemma3ForConditionalGeneration": "pagewick.models.gemma:read_gemma3_multimodal",
    "Gemma3nForCausalLM": "pagewick.models.gemma3n:read_gemma3n",
    "Gemma3nForConditionalGeneration": "pagewick.models.gemma3n:read_gemma3n_multimodal",
    "Gemma4ForCausalLM": "pagewick.models.gemma4:read_gemma4",
    "Gemma4ForConditionalGeneration": "pagewick.models.gemma4:read_gemma4_multimodal",
    "Gemma4UnifiedForCausalLM": "pagewick.models.gemma4:read_gemma4_unified",
    "Gemma4UnifiedForConditionalGeneration": "pagewick.models.gemma4:read_gemma4_unified_multimodal",
    "GlmForCausalLM": "pagewick.models.glm:read_glm",
    "Glm4ForCausalLM": "pagewick.models.glm:read_glm4",
    "Glm4vForConditionalGeneration": "pagewick.models.glm:read_glm4v",
    "Glm46VForConditionalGeneration": "pagewick.models.glm:read_glm46v",
    "Glm4vMoeForConditionalGeneration": "pagewick.models.glm_moe:read_glm4v_moe",
    "GlmOcrForConditionalGeneration": "pagewick.models.glm:read_glm_ocr",
    "Glm4MoeForCausalLM": "pagewick.models.glm_moe:read_glm4_moe",
    "Glm4MoeLiteForCausalLM": "pagewick.models.glm_moe:read_glm4_moe_lite",
    "GlmMoeDsaForCausalLM": "pagewick.models.deepseek_v32:read_glm_moe_dsa",
    "BailingHybridForCausalLM": "pagewick.models.bailing:read_bailing_hybrid",
    "BailingMoeV3ForCausalLM": "pagewick.models.bailing:read_bailing_hybrid",
    "KimiLinearForCausalLM": "pagewick.models.kimi_linear:read_kimi_linear",
    "MiniMaxM2ForCausalLM": "pagewick.models.minimax:read_minimax_m2",
    "MiniMaxM3SparseForConditionalGeneration": "pagewick.models.minimax_m3:read_minimax_m3",
    "SmolLM3ForCausalLM": "pagewick.models.smollm:read_smollm3",
    "SeedOssForCausalLM": "pagewick.models.seed_oss:read_seed_oss",
    "OlmoForCausalLM": "pagewick.models.olmo:read_olmo",
    "Olmo2ForCausalLM": "pagewick.models.olmo:read_olmo2",
    "Olmo3ForCausalLM": "pagewick.models.olmo:read_olmo3",
    "OlmoHybridForCausalLM": "pagewick.models.olmo:read_olmo_hybrid",
    "OlmoeForCausalLM": "pagewick.models.olmo:read_olmoe",
    "FlexOlmoForCausalLM": "pagewick.models.olmo:read_flex_olmo",
    "Ernie4_5ForCausalLM": "pagewick.models.ernie:read_ernie",
    "Ernie4_5_MoeForCausalLM": "pagewick.models.ernie:read_ernie_moe",
    "PaddleOCRVLForConditionalGeneration": "pagewick.models.ernie:read_paddleocr_vl",
    "HfMoondream": "pagewick.models.moondream:read_moondream",
    "Exaone4ForCausalLM": "pagewick.models.exaone:read_exaone4",
    "Exaone4_5_ForConditionalGeneration": "pagewick.models.exaone:read_exaone4_5",
    "HunYuanDenseV1ForCausalLM": "pagewick.models.hunyuan:read_hunyuan_dense",
    "HunYuanMoEV1ForCausalLM": "pagewick.models.hunyuan:read_hunyuan_moe",
    "HYV3ForCausalLM": "pagewick.models.hunyuan:read_hy_v3",
    "HYV4ForCausalLM": "pagewick.models.hy_v4:read_hy_v4",
    "MellumForCausalLM": "pagewick.models.mellum:read_mellum",
    "LagunaForCausalLM": "pagewick.models.laguna:read_laguna",
    "FlintForCausalLM": "pagewick.models.flint:read_flint",
    "Step3p7ForConditionalGeneration": "pagewick.models.step3:read_step3p7_multimodal",
    "MiMoV2FlashForCausalLM": "pagewick.models.mimo:read_mimo_v2_flash",
    "Dots1ForCausalLM": "pagewick.models.dots:read_dots1",
    "ArceeForCausalLM": "pagewick.models.llama:read_arcee",
    "ApertusForCausalLM": "pagewick.models.apertus:read_apertus",
    "AfmoeForCausalLM": "pagewick.models.afmoe:read_afmoe",
    "ExaoneMoeForCausalLM": "pagewick.models.exaone:read_exaone_moe",
    "SolarOpenForCausalLM": "pagewick.models.solar:read_solar_open",
    "InternLM3ForCausalLM": "pagewick.models.llama:read_internlm3",
    "IQuestCoderForCausalLM": "pagewick.models.llama:read_iquest_coder",
    "CwmForCausalLM": "pagewick.models.llama:read_cwm",
    "HeliumForCausalLM": "pagewick.models.helium:read_helium",
    "NemotronForCausalLM": "pagewick.models.nemotron:read_nemotron",
    "Jais2ForCausalLM": "pagewick.models.nemotron:read_jais2",
    "NanoChatForCausalLM": "pagewick.models.nanochat:read_nanochat",
    "CohereForCausalLM": "pagewick.models.cohere:read_cohere",
    "Cohere2ForCausalLM": "pagewick.models.cohere:read_cohere2",
    "Cohere2VisionForConditionalGeneration": "pagewick.models.cohere:read_cohere2_vision",
    "Cohere2MoeForCausalLM": "pagewick.models.cohere:read_cohere2_moe",
    "DeepseekV2ForCausalLM": "pagewick.models.deepseek:read_deepseek_v2",
    "DeepseekV3ForCausalLM": "pagewick.models.deepseek:read_deepseek_v3",
    "KimiK25ForConditionalGeneration": "pagewick.models.deepseek:read_kimi_multimodal",
    "Kimi_K25ForConditionalGeneration": "pagewick.models.deepseek:read_kimi_multimodal",
    "DeepseekV32ForCausalLM": "pagewick.models.deepseek_v32:read_deepseek_v32",
    "DeepseekV4ForCausalLM": "pagewick.models.deepseek_v4:read_deepseek_v4",
    "AXK1ForCausalLM": "pagewick.models.deepseek:read_axk1",
    "AXK2ForCausalLM": "pagewick.models.axk2:read_axk2",
    "LongcatFlashForCausalLM": "pagewick.models.longcat:read_longcat_flash",
    "YoutuForCausalLM": "pagewick.models.deepseek:read_youtu",
    "MiniCPM3ForCausalLM": "pagewick.models.minicpm:read_minicpm3",
    "GPT2ForCausalLM": "pagewick.models.gpt2:read_gpt2",
    "FalconForCausalLM": "pagewick.models.falcon:read_falcon",
    "OPTForCausalLM": "pagewick.models.opt:read_opt",
    "GPTNeoXForCausalLM": "pagewick.models.gpt_neox:read_gpt_neox",
    "GPTBigCodeForCausalLM": "pagewick.models.starcoder:read_gpt_bigcode",
    "Starcoder2ForCausalLM": "pagewick.models.starcoder:read_starcoder2",
    "GraniteForCausalLM": "pagewick.models.granite:read_granite",
    "HyperCLOVAXForCausalLM": "pagewick.models.granite:read_hyperclova_x",
    "GraniteMoeForCausalLM": "pagewick.models.granite:read_granite_moe",
    "GraniteMoeSharedForCausalLM": "pagewick.models.granite:read_granite_moe_shared",
    "GraniteMoeHybridForCausalLM": "pagewick.models.granite:read_granite_hybrid",
    "GraniteSWAForCausalLM": "pagewick.models.granite:read_granite_swa",
    "GraniteMoeSWAForCausalLM": "pagewick.models.granite:read_granite_moe_swa",
    "BambaForCausalLM": "pagewick.models.bamba:read_bamba",
    "JambaForCausalLM": "pagewick.models.jamba:read_jamba",
    "MambaForCausalLM": "pagewick.models.mamba_alone:read_mamba1",
    "FalconMambaForCausalLM": "pagewick.models.mamba_alone:read_falcon_mamba",
    "Mamba2ForCausalLM": "pagewick.models.mamba_alone:read_mamba2",
    "NemotronHForCausalLM": "pagewick.models.nemotron_h:read_nemotron_h",
    "FalconH1ForCausalLM": "pagewick.models.falcon_h1:read_falcon_h1",
    "Lfm2ForCausalLM": "pagewick.models.lfm2:read_lfm2",
    "Lfm2MoeForCausalLM": "pagewick.models.lfm2:read_lfm2_moe",
    "Lfm2VlForConditionalGeneration": "pagewick.models.lfm2:read_lfm2_vl",
    "Lfm3ForCausalLM": "pagewick.models.lfm2:read_lfm3",
    "Lfm3VlForConditionalGeneration": "pagewick.models.lfm2:read_lfm3_vl",
    "GptOssForCausalLM": "pagewick.models.gpt_oss:read_gpt_oss",
    "Gemma3TextModel": "pagewick.models.gemma:read_embedding_gemma",
    "BertModel": "pagewick.models.bert:read_bert",
    "BertForSequenceClassification": "pagewick.models.bert:read_bert",
    "RobertaModel": "pagewick.models.bert:read_roberta",
    "RobertaForSequenceClassification": "pagewick.models.bert:read_roberta",
    "XLMRobertaModel": "pagewick.models.bert:read_xlm_roberta",
    "XLMRobertaForSequenceClassification": "pagewick.models.bert:read_xlm_roberta",
    "CamembertModel": "pagewick.models.bert:read_roberta",
    "CamembertForSequenceClassification": "pagewick.models.bert:read_roberta",
    "DistilBertModel": "pagewick.models.distilbert:read_distilbert",
    "DistilBertForSequenceClassification": "pagewick.models.distilbert:read_distilbert",
    "ModernBertModel": "pagewick.models.modernbert:read_modernbert",
    "ModernBertForSequenceClassification": "pagewick.models.modernbert:read_modernbert",
    "MPNetModel": "pagewick.models.mpnet:read_mpnet",
    "MPNetForSequenceClassification": "pagewick.models.mpnet:read_mpnet",
    "NomicBertModel": "pagewick.models.nomic_bert:read_nomic_bert",
}
# Architectures whose names resemble a supported one, and how they differ.
_REFUSED: Final = {
    "Phi3SmallForCausalLM": "its attention is block-sparse",
    "Phi3VForCausalLM": "it reads images",
    "ChatGLMModel": "its code lies in the repository, and code from a repository is not run; use the -hf conversion",
    "ChatGLMForConditionalGeneration": "it is not a decoder of the GLM-4 kind",
    "Moondream": "it is Moondream as first published; use a revision of 2025-06-21 or later, of HfMoondream",
    "MixFormerSequentialForCausalLM": "it is Phi as first published; use the files of PhiForCausalLM",
    "YiForCausalLM": "it is Yi as first published; use the files of LlamaForCausalLM",
    "RWForCausalLM": "it is Falcon as first published; use the files of FalconForCausalLM",
    "GPT2LMHeadCustomModel": "its code lies in the repository; of SantaCoder use bigcode/gpt_bigcode-santacoder",
    "DebertaV2ForSequenceClassification": "its attention compares tokens with distances",
    "JinaBertForMaskedLM": "its attention has slopes for distances",
}
_MASKED: Final = "ForMaskedLM"
# Endings of models that do not generate text, and what they do.
_OTHER_TASKS: Final = {
    "Model": "it has no output layer, as embedding models have none",
    _MASKED: "it fills gaps in a text",
    ENDING: "it rates texts",
    "ForTokenClassification": "it rates tokens",
}


def check_architecture(architecture: str) -> None:
    """Raise ModelLoadError for an architecture that is not in the table; it names the nearest one."""
    if architecture in ARCHITECTURES:
        return
    lines = [f"architecture {architecture} is not supported"]
    if reason := _REFUSED.get(architecture):
        lines[0] += f": {reason}"
    elif other := next((what for end, what in _OTHER_TASKS.items() if architecture.endswith(end)), ""):
        lines[0] += f": {other}, and Pagewick only runs some of these"
    elif near := nearest_to(architecture):
        lines[0] += f"; the nearest that is: {near}"
    lines.append(f"  `pagewick models supported` lists all {len(ARCHITECTURES)} architectures that are")
    raise ModelLoadError("\n".join(lines))


def nearest_to(architecture: str, supported: Iterable[str] = ARCHITECTURES) -> str:
    """Return the supported name of the same family, or one that is nearly the same; empty if there is none."""
    # The part after "For" hardly tells models apart, and is often misspelt.
    stems = {name.partition("For")[0].lower(): name for name in reversed(list(supported))}
    stem = architecture.partition("For")[0].lower()
    # GraniteMoeHybrid is of Granite's family.
    if family := max(filter(stem.startswith, stems), key=len, default=""):
        return stems[family]
    # Qwen4 is of Qwen3's family; Mamba and Llama have only some letters in common.
    letters = {re.sub(r"\d", "", known): name for known, name in reversed(stems.items())}
    near = difflib.get_close_matches(re.sub(r"\d", "", stem), letters, n=1, cutoff=0.85)
    return letters[near[0]] if near else ""


def read_config(
    values: Mapping[str, Any],
    *,
    rope_scaling: str | None = None,
    rope_theta: float | None = None,
    language_model_only: bool = False,
) -> ModelConfig:
    """Read a config.json, with the user's rotary embedding (EngineConfig), if any, in place of its own.

    language_model_only: leave out the part that sees.

    Raises ModelLoadError for an architecture or an entry that is not supported, ConfigError for the user's settings.
    """
    architecture = _architecture_of(values)
    if rope_scaling is not None or rope_theta is not None:
        scaling = parse_scaling(rope_scaling)
        if all(layer.rope is None for layer in read_config(values).layers):
            flag = "--rope-theta" if scaling is None else "--rope-scaling"
            raise ConfigError(f"{flag}: {architecture} rotates nothing, its positions are learned; leave it out")
        values = override_rope(values, scaling, rope_theta)
    if language_model_only:
        # A part that is not loaded may be described in ways that are not known.
        values = {name: value for name, value in values.items() if name != "vision_config"}
    config = _read(architecture, Entries(values))
    check_number_of_experts(config)
    return config.without_vision() if language_model_only else config


def _architecture_of(values: Mapping[str, Any]) -> str:
    """Return the name in the table. Raises ModelLoadError."""
    architecture = architecture_of(values)
    if (known := known_as(architecture)) is None:
        check_architecture(architecture)
    return known or architecture


def known_as(architecture: str) -> str | None:
    """Return the name in the table of an architecture; None: it is not supported.

    A model without its output layer, such as MistralModel, makes embeddings, and one with a head of labels in its
    place, such as MistralForSequenceClassification, rates texts.
    """
    if architecture in ARCHITECTURES:
        return architecture
    # An encoder that was trained to fill gaps in texts makes embeddings without the head that does so.
    if (encoder := architecture.replace(_MASKED, "Model")) in ARCHITECTURES:
        return encoder
    for ending in ("Model", ENDING):
        whole = f"{architecture.removesuffix(ending)}ForCausalLM"
        if architecture.endswith(ending) and whole in ARCHITECTURES:
            return whole
    return None


def filled_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with its family's defaults for the entries that it leaves out. Raises as read_config."""
    architecture = _architecture_of(values)
    entries = Entries(values)
    _read(architecture, entries)
    return {**values, **entries.found}


def _read(architecture: str, entries: Entries) -> ModelConfig:
    module, _, name = ARCHITECTURES[architecture].partition(":")
    read = cast("Callable[[Entries], ModelConfig]", getattr(importlib.import_module(module), name))
    model = read(entries)
    if model.labels is None and architecture_of(entries.values).endswith(ENDING):
        # Nothing multiplies by the table of embeddings then, whether a head of a vocabulary was tied to it or not.
        model = replace(model, labels=read_label_head(entries), tie_word_embeddings=True, head_bias=False)
    elif model.encoder is None and POOLING_ENTRY in entries:
        # Some files say how the model's embeddings are made.
        model = replace(model, embedding=entries.choice(POOLING_ENTRY, POOLINGS))
    if model.encoder is None and not entries.flag("is_causal", True):
        if any(layer.window is not None for layer in model.layers):
            raise entries.wrong("is_causal", "true: windows to later tokens are not supported here")
        model = as_encoder(model, entries)
    return with_dense(model, entries)


def build_model(context: LayerContext, config: ModelConfig, tensor_names: Sequence[str] = ()) -> Decoder:
    """Build this rank's share of the model with uninitialised weights. Raises ModelLoadError.

    tensor_names: those of the file that it will be loaded from.
    """
    from pagewick.models.decoder import Decoder

    return Decoder(context, config, tensor_names)
