"""The built-in model as a GGUF file, written with the `gguf` package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

from pagewick.demo import MODEL_DIR
from pagewick.quantization.mixes import MixedModel
from tests.weights.gguf.mixes import quantize_rows, types_of
from tests.weights.gguf.vocabulary import add_vocabulary

ARCHITECTURE = "qwen3"


def write_demo(path: Path, mix: str = "Q8_0", *, is_expanded: bool = False, context_length: int | None = None) -> Path:
    """Write the built-in model with its matrices in a mix or a type, and the rest in float32.

    is_expanded: store the numbers that the blocks stand for, in float32.
    """
    config: dict[str, Any] = json.loads((MODEL_DIR / "config.json").read_text())
    path.parent.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    writer.add_type("model")
    writer.add_context_length(context_length or config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    add_vocabulary(
        writer, json.loads((MODEL_DIR / "tokenizer.json").read_text()), config["vocab_size"], pre_tokenizer="qwen2"
    )
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_chat_template(json.loads((MODEL_DIR / "tokenizer_config.json").read_text())["chat_template"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    tensors = load_file(MODEL_DIR / "model.safetensors")
    tensors = {names.get_name(name, try_suffixes=(".weight", ".bias")): tensor for name, tensor in tensors.items()}
    sizes = MixedModel(*(config[f"num_{part}"] for part in ("hidden_layers", "attention_heads", "key_value_heads")))
    types = types_of(mix, {name: tensor.shape for name, tensor in tensors.items()}, sizes)
    for stored, tensor in tensors.items():
        numbers = tensor.to(torch.float32).numpy()
        if numbers.ndim == 1:
            writer.add_tensor(stored, numbers)
            continue
        kind, rows = gguf.GGMLQuantizationType[types[stored]], quantize_rows(numbers, types[stored])
        if is_expanded:
            writer.add_tensor(stored, gguf.quants.dequantize(rows, kind))
        else:
            writer.add_tensor(stored, rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
