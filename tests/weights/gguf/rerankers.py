"""Qwen3-Reranker as a GGUF file, with the names that llama.cpp's converter gives, written with the `gguf` package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import nn

from tests.models.rerankers import BACKEND, CONTROL, NO, PREFIX, SUFFIX, YES
from tests.weights.gguf.mixes import quantize_rows
from tests.weights.gguf.vocabulary import add_vocabulary

TEMPLATE = (
    f"{PREFIX}<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    f"<Query>: {{query}}\n<Document>: {{document}}{SUFFIX}"
)


def write_gguf(path: Path, model: nn.Module, *, kind: str = "F32", template: str | None = TEMPLATE) -> Path:
    """Write a model of Qwen3's kind as a reranker. kind: the type of its matrices. template: None: it has none."""
    config: Any = model.config
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_type("model")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_pooling_type(gguf.PoolingType.RANK)
    writer.add_classifier_output_labels(["yes", "no"])
    if template is not None:
        writer.add_chat_template([{"name": "rerank", "template": template}])
    add_vocabulary(writer, json.loads(BACKEND.to_str()), config.vocab_size, pre_tokenizer="gpt-2")
    writer.add_eos_token_id(BACKEND.token_to_id(CONTROL[2]))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    head = model.get_output_embeddings().weight  # type: ignore[operator]
    tensors = {"cls.output.weight": head[[YES, NO]]}
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert stored is not None, name
            tensors[stored] = tensor
    for stored, tensor in tensors.items():
        numbers = tensor.detach().to(torch.float32).numpy()
        if kind == "F32" or numbers.ndim == 1:
            writer.add_tensor(stored, numbers)
        else:
            writer.add_tensor(stored, quantize_rows(numbers, kind), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
