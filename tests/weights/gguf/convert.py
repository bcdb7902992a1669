"""Write the files of MODELS with llama.cpp's converter: python -m tests.weights.gguf.convert LLAMA_CPP [NAME ...]

NAME is one of MODELS, wide/ before one of them, mtp/ before one of predicting_models.MODELS, or images/ before one of
vision_models.ALL, which are two files.

LLAMA_CPP is the directory of llama.cpp's sources, as they also lie in vendor/ of llama-cpp-python's sources. The files
in `files/` were written with those of llama-cpp-python 0.3.36. The tokenizer is a stand-in: models are compared by ids.
"""

from __future__ import annotations

import json
import lzma
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from safetensors.torch import load_file, save_file
from torch import nn

from tests.models.checkpoints import save
from tests.models.predicting import Predicting
from tests.weights.gguf import predicting_models, vision_models
from tests.weights.gguf.forms_2026 import publish_exaone, publish_ling, publish_mimo, publish_minicpm, publish_step
from tests.weights.gguf.internvl_form import publish_internvl
from tests.weights.gguf.models import FACTORED, FILES, MODELS, VOCAB_SIZE, original

# The architectures that published files name for the text parts of their models.
_TEXT_PARTS: Final = {
    "smolvlm": "LlamaForCausalLM", "idefics3": "LlamaForCausalLM", "lfm2_vl": "Lfm2ForCausalLM",
    "lighton_ocr": "Qwen3ForCausalLM",
}  # fmt: skip


def convert(name: str, directory: Path, *, is_wide: bool) -> bytes:
    """Return the float32 file of a model. directory: an empty one. is_wide: of the wide model, filled with zeros."""
    model = original(name, is_wide=is_wide)
    if is_wide:
        for weight in model.parameters():
            weight.data.zero_()
    return _text_part(name, model, directory, [f"t{token_id}" for token_id in range(VOCAB_SIZE)])


def convert_predicting(name: str, directory: Path) -> bytes:
    """Return the float32 file of a model with a layer that predicts further tokens. directory: an empty one."""
    model = predicting_models.original(name)
    tokens = [f"t{token_id}" for token_id in range(VOCAB_SIZE)]
    return _text_part(name, model, directory, tokens, has_mtp=True)


def convert_pair(name: str, directory: Path) -> tuple[bytes, bytes]:
    """Return the float32 files of the text part and of the vision part of a model. directory: an empty one."""
    import gguf
    from conversion import get_model_class

    tokens = [f"t{token_id}" for token_id in range(vision_models.VOCAB_SIZE)]
    tokens[vision_models.IMAGE] = vision_models.placeholder_of(name)
    if name in vision_models.ROWS:
        tokens[vision_models.IMAGE + 1] = vision_models.ROW_END
    text = _text_part(name, vision_models.original(name), directory, tokens)
    if name in ("gemma-3-multimodal", "lfm2-vl"):
        _rename_tower(directory / "model.safetensors")
    base = get_model_class(_architecture(directory, "MMPROJ"), mmproj=True)
    converter = type(base.__name__, (base,), {"model_arch": base.model_arch})
    path = directory / "mmproj.gguf"
    converter(directory, gguf.LlamaFileType.ALL_F32, path).write()
    return text, path.read_bytes()


def _text_part(
    name: str, model: nn.Module | Predicting, directory: Path, tokens: list[str], *, has_mtp: bool = False
) -> bytes:
    import gguf
    from conversion import get_model_class

    def set_vocab(converter: Any) -> None:
        writer = converter.gguf_writer
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_types([1] * len(tokens))
        writer.add_token_merges(["t 0"])
        writer.add_eos_token_id(1)

    if isinstance(model, Predicting):
        model.write(directory)
    else:
        save(model, directory)
    # Gemma 3's converter cuts the embeddings to the tokenizer's size.
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    state = {"type": "BPE", "vocab": vocabulary, "merges": []}
    added = [{"id": token_id, "content": token} for token, token_id in vocabulary.items() if token.startswith("[")]
    (directory / "tokenizer.json").write_text(json.dumps({"model": state, "added_tokens": added}))
    (directory / "tokenizer_config.json").write_text("{}")
    if name == "qwen3-vl-moe":
        _transpose_experts(directory / "model.safetensors")
    _publish_config(directory / "config.json")
    if name.startswith("ling-3"):
        publish_ling(directory)
    if name == "exaone-4.5":
        publish_exaone(directory)
    if name.startswith("minicpm-v"):
        publish_minicpm(directory)
    if name == "step-3.7":
        publish_step(directory)
    if name == "mimo-v2-flash":
        publish_mimo(directory)
    if name.startswith("internvl"):
        publish_internvl(directory)
    architecture = _architecture(directory, "TEXT")
    # Mistral 3's hands everything to another class, and is the only one to know Mistral 4.
    is_mistral4 = architecture == "Mistral4ForCausalLM" or name == "mistral-small-4"
    base = get_model_class("Ministral3ForCausalLM" if is_mistral4 else architecture)
    base = getattr(base, "Mistral4Model" if is_mistral4 else "Ministral3Model", base)

    def modify_tensors(converter: Any, data: Any, tensor_name: str, layer: int | None) -> Iterator[Any]:
        # StableLM's returns the stacked norms of the heads from a generator, where its caller loses them.
        yield from (yield from base.modify_tensors(converter, data, tensor_name, layer)) or ()

    members = {
        "set_vocab": set_vocab,
        "modify_tensors": modify_tensors,
        "model_arch": base.model_arch,
        "no_mtp": not has_mtp,
    }
    converter = type(base.__name__, (base,), members)
    path = directory / "model.gguf"
    converter(directory, gguf.LlamaFileType.ALL_F32, path).write()
    return path.read_bytes()


def _architecture(directory: Path, part: str) -> str:
    """Return the architecture of the part TEXT or MMPROJ as the converter finds it."""
    from conversion.base import ModelType, get_model_architecture

    return str(get_model_architecture(json.loads((directory / "config.json").read_text()), ModelType[part]))


def _publish_config(path: Path) -> None:
    """Spell a config.json as the published files of some models do, which transformers rewrites."""
    config = json.loads(path.read_text())
    kinds = {"linear_attention": "mamba", "full_attention": "attention"}
    if config["model_type"] == "granitemoehybrid":
        config["layer_types"] = [kinds[kind] for kind in config["layer_types"]]
        if not config["num_local_experts"]:
            del config["num_experts_per_tok"]
    elif config["model_type"] == "nemotron_h":
        letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
        config["hybrid_override_pattern"] = "".join(letters[kind] for kind in config.pop("layers_block_type"))
        config["num_hidden_layers"] = len(config["hybrid_override_pattern"])
        # The converter would fill it with transformers' defaults, which have experts.
        del config["model_type"]
        if "E" not in config["hybrid_override_pattern"]:
            of_experts = [key for key in config if "expert" in key or ("group" in key and key != "n_groups")]
            config = {key: value for key, value in config.items() if key not in of_experts}
    elif config["model_type"] == "hunyuan_v1_moe":
        sizes = {"moe_topk": config["moe_topk"], "moe_intermediate_size": config["intermediate_size"]}
        config |= {
            name: [size] * config["num_hidden_layers"] for name, size in {**sizes, "num_shared_expert": 1}.items()
        }
    elif config["model_type"] == "afmoe":
        config["route_norm"] = True
    elif config["model_type"] in _TEXT_PARTS:
        config["text_config"]["architectures"] = [_TEXT_PARTS[config["model_type"]]]
        config["architectures"] = [name.replace("LightOnOcr", "LightOnOCR") for name in config["architectures"]]
    elif config["model_type"] == "phimoe":
        config["architectures"] = ["PhiMoEForCausalLM"]
    elif config["model_type"] == "gpt2":
        config["n_ctx"] = config["n_positions"]
    elif config["model_type"] == "gpt_neox":
        config["rotary_pct"] = config["rope_parameters"]["partial_rotary_factor"]
        # transformers would rename it again.
        del config["model_type"]
    elif config["model_type"] == "falcon" and not config["new_decoder_architecture"]:
        config["num_kv_heads"] = 1
    elif config["model_type"] == "kimi_linear":
        full = [idx for idx, kind in enumerate(config["layer_types"], 1) if kind == "full_attention"]
        config["linear_attn_config"] = {
            "full_attn_layers": full,
            "head_dim": config["linear_head_dim"],
            "short_conv_kernel_size": config["linear_conv_kernel_dim"],
        }
        config["moe_router_activation_func"] = "sigmoid"
        # transformers would drop these.
        del config["model_type"]
    elif config["model_type"] == "bamba":
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        config["attn_rotary_emb"] = int(config["rope_parameters"]["partial_rotary_factor"] * head_dim)
    path.write_text(json.dumps(config))


def _transpose_experts(path: Path) -> None:
    """Store experts as the published files of Qwen3-VL do, which transformers transposes when it loads them."""
    weights = load_file(path)
    for name, weight in weights.items():
        if ".experts." in name:
            weights[name] = weight.transpose(1, 2).contiguous()
    save_file(weights, path, {"format": "pt"})


def _rename_tower(path: Path) -> None:
    """Give the encoder of Gemma 3 or LFM2-VL the names of the published files, which transformers leaves out."""
    weights = load_file(path)
    renamed = {name.replace("vision_tower.", "vision_tower.vision_model."): one for name, one in weights.items()}
    save_file(renamed, path, {"format": "pt"})


def main() -> None:
    # Before the installed packages: the converter needs the gguf package beside it.
    sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/gguf-py"]
    pairs = [f"images/{name}" for name in vision_models.ALL]
    predicting = [f"mtp/{name}" for name in predicting_models.MODELS]
    for name in sys.argv[2:] or [*MODELS, *FACTORED, *(f"wide/{name}" for name in MODELS), *pairs, *predicting]:
        with tempfile.TemporaryDirectory() as directory:
            folder, _, model = name.rpartition("/")
            if folder == "images":
                text, vision = convert_pair(model, Path(directory))
                contents = {name: text, f"{folder}/mmproj-{model}": vision}
            elif folder == "mtp":
                contents = {name: convert_predicting(model, Path(directory))}
            else:
                contents = {name: convert(model, Path(directory), is_wide=folder == "wide")}
        for stored, content in contents.items():
            compressed = lzma.compress(content, preset=9)
            (FILES / f"{stored}.gguf.xz").write_bytes(compressed)
            print(stored, len(compressed))


if __name__ == "__main__":
    main()
