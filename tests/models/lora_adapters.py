"""Adapters that PEFT writes for small random models, and the logits that it computes with them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def linear_names(model: nn.Module) -> list[str]:
    """The names of the linear layers that adapters may change: not the head, experts, routers or encoders.

    In DeepSeek's models, PEFT takes the projections of every MLP for those of experts. It does not find those of shared
    experts in adapters of Mistral Large 4 that it has written itself.
    """
    left_out = [
        "lm_head",
        "embed_out",
        ".experts.",
        ".router",
        "kv_b_proj",
        "visual.",
        "vision_tower.",
        "multi_modal_projector.",
        "indexer.weights_proj",
        "shared_expert_gate",
    ]
    left_out += [".mlp."] * ("deepseek" in model.config.model_type)
    left_out += [".shared_experts."] * (model.config.model_type == "mistral_large4")
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | Conv1D)
        and not any(part in name for part in left_out)
        and not name.endswith((".gate", "per_layer_model_projection"))
    ]


def write_adapter(
    model: nn.Module, directory: Path, targets: Sequence[str] | str, *, seed: int = 0, rank: int = 4, **config: Any
) -> None:
    """Write an adapter with random factors, as PEFT does. The model is left as it was."""
    torch.manual_seed(seed)
    wanted = LoraConfig(
        **{"r": rank, "lora_alpha": 3 * rank, "target_modules": list(targets), "init_lora_weights": False, **config}
    )
    with _without_warnings():
        adapted = get_peft_model(model, wanted)
        adapted.save_pretrained(str(directory))
        adapted.unload()


def write_adapters(model: nn.Module, directory: Path) -> dict[str, str]:
    """Write two adapters: "wide" changes all linear layers, "narrow" a few, and its rank is odd.

    Returns their paths by name.
    """
    names = linear_names(model)
    write_adapter(model, directory / "wide", names, seed=1)
    ends = ("q_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value", "down_proj", "o_proj")
    some = [one for one in names if one.endswith(ends)]
    patterns = {"alpha_pattern": {"v_proj": 7, "down_proj": 2}, "rank_pattern": {"(down|o)_proj": 3}}
    write_adapter(model, directory / "narrow", some, seed=2, rank=5, use_rslora=True, **patterns)
    return {name: str(directory / name) for name in ("wide", "narrow")}


@contextmanager
def _without_warnings() -> Iterator[None]:
    """PEFT asks for deprecated attributes, and warns that it does not find the base model on a hub."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def adapted(model: nn.Module, directory: Path | None) -> Iterator[Callable[[Sequence[int]], Tensor]]:
    """A function from token ids to logits [T, V] of the model with an adapter; None: of the model as it is."""
    with _without_warnings():
        changed = model if directory is None else PeftModel.from_pretrained(model, str(directory))

    def logits(token_ids: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            return changed(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()

    try:
        yield logits
    finally:
        if isinstance(changed, PeftModel):
            changed.unload()
