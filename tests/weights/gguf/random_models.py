"""Small models with random weights in any of ggml's formats. Rows are whole blocks of 256 columns, on two ranks too.

A matrix gets random bytes, and scales that give its numbers the standard deviation that they would have elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import gguf
import torch
from torch import Tensor

from pagewick.kernels.block_formats import unpack
from tests.kernels.block_rows import EXPANDED, LAYOUTS, OWN, random_rows

VOCAB_SIZE: Final = 200
_H, _I, _HEADS, _KV_HEADS, _HEAD_DIM = 256, 512, 8, 2, 64
_EXPERTS, _CHOSEN = 4, 2
_SIZES: Final = {
    "context_length": 512, "embedding_length": _H, "block_count": 2, "feed_forward_length": _I,
    "attention.head_count": _HEADS, "attention.head_count_kv": _KV_HEADS, "attention.key_length": _HEAD_DIM,
    "attention.value_length": _HEAD_DIM, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e4,
}  # fmt: skip
_ATTENTION: Final = {
    "attn_q": (_HEADS * _HEAD_DIM, _H), "attn_k": (_KV_HEADS * _HEAD_DIM, _H), "attn_v": (_KV_HEADS * _HEAD_DIM, _H),
    "attn_output": (_H, _HEADS * _HEAD_DIM), "attn_q_norm": (_HEAD_DIM,), "attn_k_norm": (_HEAD_DIM,),
}  # fmt: skip
_DENSE: Final = {"ffn_gate": (_I, _H), "ffn_up": (_I, _H), "ffn_down": (_H, _I)}
_ROUTED: Final = {
    "ffn_gate_inp": (_EXPERTS, _H), "ffn_gate_exps": (_EXPERTS, _I, _H), "ffn_up_exps": (_EXPERTS, _I, _H),
    "ffn_down_exps": (_EXPERTS, _H, _I),
}  # fmt: skip
_EXPERT_SIZES: Final = {"expert_count": _EXPERTS, "expert_used_count": _CHOSEN, "expert_feed_forward_length": _I}
_LATENT_HEADS, _ROPE, _NOPE, _VALUE, _RANK = 4, 32, 64, 128, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """An architecture, its sizes, and the tensors of its layers; layers below num_dense have `dense`."""

    architecture: str
    sizes: Mapping[str, Any]
    attention: Mapping[str, tuple[int, ...]]
    feed_forward: Mapping[str, tuple[int, ...]]
    num_dense: int = 0


KINDS: Final = {
    "dense": Kind(architecture="qwen3", sizes=_SIZES, attention=_ATTENTION, feed_forward=_DENSE),
    "experts": Kind(
        architecture="qwen3moe", sizes={**_SIZES, **_EXPERT_SIZES}, attention=_ATTENTION, feed_forward=_ROUTED
    ),
    "latents": Kind(
        architecture="deepseek2",
        sizes={
            **_SIZES, **_EXPERT_SIZES, "attention.head_count": _LATENT_HEADS, "attention.head_count_kv": 1,
            "attention.key_length": _NOPE + _ROPE, "attention.value_length": _VALUE, "attention.kv_lora_rank": _RANK,
            "attention.q_lora_rank": _RANK, "rope.dimension_count": _ROPE, "leading_dense_block_count": 1,
            "expert_shared_count": 1, "expert_weights_scale": 1.0,
        },
        attention={
            "attn_q_a": (_RANK, _H), "attn_q_a_norm": (_RANK,), "attn_q_b": (_LATENT_HEADS * (_NOPE + _ROPE), _RANK),
            "attn_kv_a_mqa": (_RANK + _ROPE, _H), "attn_kv_a_norm": (_RANK,),
            "attn_kv_b": (_LATENT_HEADS * (_NOPE + _VALUE), _RANK), "attn_output": (_H, _LATENT_HEADS * _VALUE),
        },
        feed_forward={
            **_ROUTED, "ffn_gate_shexp": (_I, _H), "ffn_up_shexp": (_I, _H), "ffn_down_shexp": (_H, _I),
        },
        num_dense=1,
    ),
}  # fmt: skip


def random_blocks(stored_type: str, *shape: int, std: float = 1.0, seed: int = 0) -> Tensor:
    """Return a tensor [*shape] as rows of blocks [..., bytes] uint8, whose numbers have a standard deviation.

    Types without a scale in float16 have about 0.03.
    """
    if stored_type in OWN:
        return _random_own_blocks(stored_type, shape, std, seed)
    *_, places = {**LAYOUTS, **EXPANDED}[stored_type]
    if not places:
        return random_rows(stored_type, prod(shape[:-1]), shape[-1], seed).view(*shape[:-1], -1)
    kind = gguf.GGMLQuantizationType[stored_type]
    numbers, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(
        0, 256, (*shape[:-1], shape[-1] // numbers, num_bytes), generator=generator, dtype=torch.uint8
    )
    for factor in (1.0, None):
        scale = std / float(dequantized(stored_type, blocks.flatten(-2)).std()) if factor is None else factor
        for start in places:
            signs = torch.randint(0, 2, blocks.shape[:-1], generator=generator) * 2 - 1
            halves = (signs * scale).half().unsqueeze(-1)
            blocks[..., start : start + 2] = halves.view(torch.uint8)
    return blocks.flatten(-2)


def _random_own_blocks(stored_type: str, shape: tuple[int, ...], std: float, seed: int) -> Tensor:
    rows = random_rows(stored_type, prod(shape[:-1]), shape[-1], seed)
    _, num_bytes, num_scales = OWN[stored_type]
    scales = rows.view(len(rows), -1, num_bytes)[..., : 4 * num_scales]
    factor = std / float(dequantized(stored_type, rows).std())
    scales.copy_((scales.contiguous().view(torch.float32) * factor).view(torch.uint8))
    return rows.view(*shape[:-1], -1)


def dequantized(stored_type: str, rows: Tensor) -> Tensor:
    """Return the numbers of rows of blocks, as the `gguf` package reads them if it knows the type."""
    if stored_type in OWN:
        return unpack(stored_type, rows).numbers()
    return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[stored_type]))


def write_random(
    path: Path,
    kind: str,
    stored_type: str | Callable[[str], str],
    *,
    is_tied: bool = False,
    is_expanded: bool = False,
    seed: int = 0,
) -> Path:
    """Write a model of KINDS. stored_type: of its matrices, or a function of a tensor's name without its layer.

    is_expanded: store the numbers that the blocks stand for, in float32.
    """
    model = KINDS[kind]
    writer = gguf.GGUFWriter(path, model.architecture)
    writer.add_type("model")
    for key, value in model.sizes.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{model.architecture}.{key}", value)
    _add_vocabulary(writer)
    for number, (name, shape) in enumerate(_tensors(model, is_tied).items()):
        stem = name.removesuffix(".weight").split(".")[-1]
        generator = torch.Generator().manual_seed(number + 1000 * seed)
        if len(shape) == 1 or stem == "ffn_gate_inp":
            numbers = torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else 0.1)
            writer.add_tensor(name, (numbers + (len(shape) == 1)).numpy())
            continue
        chosen = stored_type if isinstance(stored_type, str) else stored_type(stem)
        std = 0.25 if stem in ("token_embd", "output") else 1.2 / shape[-1] ** 0.5
        if chosen in ("F32", "F16"):
            numbers = torch.randn(shape, generator=generator) * std
            writer.add_tensor(name, (numbers.half() if chosen == "F16" else numbers).numpy())
        else:
            rows = random_blocks(chosen, *shape, std=std, seed=number + 1000 * seed)
            if is_expanded:
                writer.add_tensor(name, dequantized(chosen, rows).numpy())
            else:
                writer.add_tensor(name, rows.numpy(), raw_dtype=gguf.GGMLQuantizationType[chosen])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(model: Kind, is_tied: bool) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB_SIZE, _H), "output_norm.weight": (_H,)}
    if not is_tied:
        found["output.weight"] = (VOCAB_SIZE, _H)
    for layer in range(model.sizes["block_count"]):
        feed_forward = _DENSE if layer < model.num_dense else model.feed_forward
        parts = {"attn_norm": (_H,), "ffn_norm": (_H,), **model.attention, **feed_forward}
        found |= {f"blk.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return found


def _add_vocabulary(writer: Any) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{token_id}" for token_id in range(VOCAB_SIZE)])
    writer.add_token_types([1] * VOCAB_SIZE)
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(1)
