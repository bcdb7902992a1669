"""Tiny random encoders, written by transformers, the reference for them. Their weights reveal mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCAB_SIZE = 193
_BERT = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6,
    "intermediate_size": 70, "max_position_embeddings": 80, "layer_norm_eps": 1e-6, "pad_token_id": 0,
}  # fmt: skip
_ROBERTA = {**_BERT, "pad_token_id": 1, "type_vocab_size": 1}
_MODERN = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 3,
    "intermediate_size": 70, "max_position_embeddings": 300, "local_attention": 10, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None, "cls_token_id": None, "sep_token_id": None,
}  # fmt: skip
_GEMMA = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 70, "max_position_embeddings": 300,
    "sliding_window": 11, "query_pre_attn_scalar": 13, "use_bidirectional_attention": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class EncoderVariant:
    """kind: the name of transformers' classes. is_llama: its config is that of a decoder."""

    kind: str
    entries: dict[str, Any]
    model: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def all_entries(self) -> dict[str, Any]:
        return {**self.entries, **self.extra}


ENCODERS = {
    "bert": EncoderVariant("Bert", _BERT),
    "bert-relu": EncoderVariant("Bert", _BERT, extra={"hidden_act": "relu", "type_vocab_size": 3}),
    "roberta": EncoderVariant("Roberta", _ROBERTA),
    "xlm-roberta": EncoderVariant("XLMRoberta", _ROBERTA, extra={"pad_token_id": 3, "hidden_act": "gelu_new"}),
    "camembert": EncoderVariant("Camembert", _ROBERTA),
    "distilbert": EncoderVariant(
        "DistilBert",
        {
            "vocab_size": VOCAB_SIZE, "dim": 48, "n_layers": 3, "n_heads": 6, "hidden_dim": 70,
            "max_position_embeddings": 80, "pad_token_id": 0,
        },
    ),
    "modernbert": EncoderVariant("ModernBert", _MODERN),
    "modernbert-biases": EncoderVariant(
        "ModernBert",
        _MODERN,
        extra={"norm_bias": True, "attention_bias": True, "mlp_bias": True, "local_attention": 7},
    ),
    "mpnet": EncoderVariant("MPNet", {**_BERT, "pad_token_id": 1, "max_position_embeddings": 200}),
    "nomic-bert": EncoderVariant("NomicBert", _BERT),
    "embedding-gemma": EncoderVariant("Gemma3Text", _GEMMA, model="Gemma3TextModel"),
}  # fmt: skip
# Those with heads of labels.
LABELLED = [name for name in ENCODERS if name not in ("nomic-bert", "embedding-gemma")]


# Architecture -> the variant of it with most kinds of tensors.
VARIANT_OF_ENCODER = {
    architecture: name
    for name, variant in ENCODERS.items()
    for architecture in (
        [variant.model or f"{variant.kind}Model", *([f"{variant.kind}ForSequenceClassification"] * (name in LABELLED))]
    )
}


def make_encoder(name: str, task: str = "Model", **entries: Any) -> nn.Module:
    """The transformers model of the variant `name` with random weights, in float32. task: the end of its class."""
    variant = ENCODERS[name]
    config = getattr(transformers, f"{variant.kind}Config")(**{**variant.all_entries(), **entries})
    made = getattr(transformers, variant.model or f"{variant.kind}{task}")
    torch.manual_seed(sum(map(ord, name + task)))
    model = made._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            _reinitialise(parameter_name, parameter)
    return model  # type: ignore[no-any-return]


def write_encoder(name: str, directory: Path, task: str = "Model", **entries: Any) -> nn.Module:
    """Write the checkpoint of make_encoder, and return the model."""
    model = make_encoder(name, task, **entries)
    model.save_pretrained(directory)  # type: ignore[operator]
    return model


def _reinitialise(name: str, weight: Tensor) -> None:
    """Move norm weights and biases away from 1 and 0, and make attention peaked."""
    if name.endswith("bias"):
        weight.normal_(0, 0.2)
    elif weight.dim() == 1:
        weight.uniform_(-0.5, 0.5).add_(0.0 if bool((weight == 0).all()) else 1.0)
    elif "embed" in name:
        weight.normal_(0, 0.5)
    else:
        weight.normal_(0, 2.0 / weight.shape[-1] ** 0.5)


def hidden_states(model: nn.Module, prompts: Sequence[list[int]], **inputs: Sequence[list[int]]) -> list[Tensor]:
    """transformers' output of the last layer for each prompt by itself: [num_tokens, hidden_size] float32."""
    with torch.no_grad():
        return [
            model(torch.tensor([prompt]), **{name: torch.tensor([each[index]]) for name, each in inputs.items()})
            .last_hidden_state[0]
            .float()
            for index, prompt in enumerate(prompts)
        ]
