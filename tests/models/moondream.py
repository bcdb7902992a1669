"""Moondream 2 by other means than its own code, which is in no package: parts of transformers, and PIL and numpy.

Its text part is Phi's, whose tokens of an image, and the one ahead of them, see each other. Its encoder is SigLIP's.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

# The entry config.vision of the variant.
VISION: dict[str, Any] = {
    "enc_dim": 24, "enc_patch_size": 2, "enc_n_layers": 2, "enc_ff_dim": 36, "enc_n_heads": 3, "proj_out_dim": 96,
    "crop_size": 10, "max_crops": 5, "overlap_margin": 1, "proj_inner_dim": 40,
}  # fmt: skip
_TEXT_NAMES = {
    "model.embed_tokens.weight": "wte", "model.final_layernorm": "post_ln", "model.layers": "blocks",
    "input_layernorm": "ln", "self_attn.dense": "attn.proj",
}  # fmt: skip
_QKV = ("q_proj", "k_proj", "v_proj")
_BLOCK = {
    "layer_norm1": "ln1", "layer_norm2": "ln2", "self_attn.out_proj": "attn.proj", "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}  # fmt: skip


def publish_moondream(directory: Path, config: dict[str, Any]) -> None:
    """Write what transformers has written as Phi as Moondream is published, with an encoder and a part for points."""
    phi = load_file(directory / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    for name, tensor in phi.items():
        if ".k_proj" in name or ".v_proj" in name:
            continue
        if ".q_proj" in name:
            tensor = torch.cat([phi[name.replace("q_proj", one)] for one in _QKV])
            name = name.replace("self_attn.q_proj", "attn.qkv")
        for ours, theirs in _TEXT_NAMES.items():
            name = name.replace(ours, theirs)
        tensors[f"text.{name}"] = tensor
    vision = config["moondream"]
    tensors |= _seeing(vision) | {"region.coord_encoder.weight": torch.zeros(2, 3)}
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, directory / "model.safetensors")
    side = vision["crop_size"] // vision["enc_patch_size"]
    text = {
        "dim": config["hidden_size"], "ff_dim": config["intermediate_size"], "n_layers": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"], "max_context": config["max_position_embeddings"],
        "n_heads": config["num_attention_heads"], "n_kv_heads": config["num_key_value_heads"],
        "prefix_attn": side**2 + 1,
    }  # fmt: skip
    published = {
        "architectures": ["HfMoondream"], "model_type": "moondream1", "torch_dtype": "float32",
        "config": {"text": text, "vision": vision, "tokenizer": {"eos_id": 1}},
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(published))


def _seeing(vision: dict[str, Any]) -> dict[str, Tensor]:
    """Return random tensors of an encoder."""
    generator = torch.Generator().manual_seed(5)
    size, inner, num_patches = vision["enc_dim"], vision["enc_ff_dim"], 3 * vision["enc_patch_size"] ** 2
    linear = {"vision.patch_emb": (size, num_patches)}
    norms = ["vision.post_ln"]
    for block in (f"vision.blocks.{index}" for index in range(vision["enc_n_layers"])):
        linear |= {f"{block}.attn.qkv": (3 * size, size), f"{block}.attn.proj": (size, size)}
        linear |= {f"{block}.mlp.fc1": (inner, size), f"{block}.mlp.fc2": (size, inner)}
        norms += [f"{block}.ln1", f"{block}.ln2"]
    linear["vision.proj_mlp.fc1"] = vision["proj_inner_dim"], 2 * size
    linear["vision.proj_mlp.fc2"] = vision["proj_out_dim"], vision["proj_inner_dim"]
    found = {}
    for name, (rows, columns) in linear.items():
        found[f"{name}.weight"] = torch.randn(rows, columns, generator=generator) * 2 / columns**0.5
        found[f"{name}.bias"] = torch.randn(rows, generator=generator) * 0.2
    for name in norms:
        found[f"{name}.weight"] = 0.5 + torch.rand(size, generator=generator)
        found[f"{name}.bias"] = torch.randn(size, generator=generator) * 0.2
    side = vision["crop_size"] // vision["enc_patch_size"]
    found["vision.pos_emb"] = torch.randn(1, side**2, size, generator=generator)
    return found


def tiling(height: int, width: int, window: int, most: int) -> tuple[int, int]:
    """Return the rows and columns of crops for an image without its margins."""
    if min(height, width) <= window:
        return 1, 1
    down, across = -(-height // window), -(-width // window)
    if down * across > most:
        scale = (most / (down * across)) ** 0.5
        return max(1, int(down * scale)), max(1, int(across * scale))
    rows, columns = max(down, int((most * height / width) ** 0.5)), max(across, int((most * width / height) ** 0.5))
    if rows * columns > most and columns > rows:
        columns = most // rows
    elif rows * columns > most:
        rows = most // columns
    return max(1, rows), max(1, columns)


class Reference:
    """A checkpoint that `publish_moondream` has written. phi: its text part in transformers, with the same weights."""

    def __init__(self, directory: Path, phi: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        self.phi = phi.to(dtype)
        self.vision = json.loads((directory / "config.json").read_text())["config"]["vision"]
        stored = load_file(directory / "model.safetensors")
        self.tensors = {name.removeprefix("model.vision."): tensor.to(dtype) for name, tensor in stored.items()}
        self.siglip = self._siglip().to(dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["pos_emb"].dtype

    def _siglip(self) -> nn.Module:
        vision, given = self.vision, self.tensors
        size, patch = vision["enc_dim"], vision["enc_patch_size"]
        config = transformers.SiglipVisionConfig(
            hidden_size=size, intermediate_size=vision["enc_ff_dim"], num_hidden_layers=vision["enc_n_layers"],
            num_attention_heads=vision["enc_n_heads"], image_size=vision["crop_size"], patch_size=patch,
            layer_norm_eps=1e-5, hidden_act="gelu_pytorch_tanh", vision_use_head=False, attn_implementation="eager",
        )  # fmt: skip
        model = transformers.SiglipVisionModel(config).eval()
        found = {
            "embeddings.patch_embedding.weight": given["patch_emb.weight"].view(size, 3, patch, patch),
            "embeddings.patch_embedding.bias": given["patch_emb.bias"],
            "embeddings.position_embedding.weight": given["pos_emb"][0],
        }
        for leaf in ("weight", "bias"):
            found[f"post_layernorm.{leaf}"] = given[f"post_ln.{leaf}"]
            for index in range(vision["enc_n_layers"]):
                layer, block = f"encoder.layers.{index}", f"blocks.{index}"
                found |= {
                    f"{layer}.{ours}.{leaf}": given[f"{block}.{theirs}.{leaf}"] for ours, theirs in _BLOCK.items()
                }
                for one, part in zip(_QKV, given[f"{block}.attn.qkv.{leaf}"].chunk(3), strict=True):
                    found[f"{layer}.self_attn.{one}.{leaf}"] = part
        names = {name.removeprefix("vision_model."): name for name in model.state_dict()}
        model.load_state_dict({names[name]: tensor for name, tensor in found.items()})
        return model

    @torch.inference_mode()
    def rows(self, image: Image.Image) -> Tensor:
        """Return the inputs of the text part for the tokens of an image."""
        side, margin = self.vision["crop_size"], self.vision["overlap_margin"]
        edge = margin * self.vision["enc_patch_size"]
        window, of_crop = side - 2 * edge, side // self.vision["enc_patch_size"]
        rows, columns = tiling(
            image.height - 2 * edge, image.width - 2 * edge, window, self.vision.get("max_crops", 12)
        )
        size = columns * window + 2 * edge, rows * window + 2 * edge
        large, small = (np.asarray(image.resize(it, Image.Resampling.LANCZOS)) for it in (size, (side, side)))
        whole = self._encoded(small)
        # For each place in the grid, the crop in whose inner part it lies, or at whose outer edge.
        inner = of_crop - 2 * margin
        grid = torch.empty(rows * inner + 2 * margin, columns * inner + 2 * margin, whole.shape[-1], dtype=self.dtype)
        crops = {
            (row, column): self._encoded(
                large[row * window : row * window + side, column * window : column * window + side]
            ).view(of_crop, of_crop, -1)
            for row in range(rows)
            for column in range(columns)
        }
        for down in range(grid.shape[0]):
            for across in range(grid.shape[1]):
                row = min(max((down - margin) // inner, 0), rows - 1)
                column = min(max((across - margin) // inner, 0), columns - 1)
                grid[down, across] = crops[row, column][down - row * inner, across - column * inner]
        averaged = [
            grid[_share(down, of_crop, grid.shape[0]), _share(across, of_crop, grid.shape[1])].flatten(0, 1).mean(0)
            for down in range(of_crop)
            for across in range(of_crop)
        ]
        x = torch.cat([whole, torch.stack(averaged)], dim=-1)
        x = nn.functional.linear(x, self.tensors["proj_mlp.fc1.weight"], self.tensors["proj_mlp.fc1.bias"])
        x = nn.functional.gelu(x, approximate="tanh")
        return nn.functional.linear(x, self.tensors["proj_mlp.fc2.weight"], self.tensors["proj_mlp.fc2.bias"])

    def _encoded(self, pixels: np.ndarray[Any, Any]) -> Tensor:
        normed = (torch.tensor(pixels).to(self.dtype) / 255 - 0.5) / 0.5
        return self.siglip(normed.permute(2, 0, 1).unsqueeze(0)).last_hidden_state[0]  # type: ignore[no-any-return]

    @torch.inference_mode()
    def logits(self, token_ids: list[int], image: Image.Image | None = None, *, num_blind: int = 0) -> Tensor:
        """Return the logits of all tokens, [T, vocab_size]. An image has the tokens from the second one on.

        num_blind: the number of first tokens that do not see it, which the model does not have.
        """
        embeds = self.phi.get_input_embeddings()(torch.tensor([token_ids]))  # type: ignore[operator]
        sees = torch.ones(len(token_ids), len(token_ids), dtype=torch.bool).tril()
        if image is not None:
            rows = self.rows(image)
            embeds[0, 1 : 1 + len(rows)] = rows
            sees[num_blind : 1 + len(rows), : 1 + len(rows)] = True
        mask = torch.zeros(sees.shape, dtype=self.dtype).masked_fill(~sees, -math.inf)
        return self.phi(inputs_embeds=embeds, attention_mask=mask[None, None], use_cache=False).logits[0]  # type: ignore[no-any-return]


def _share(index: int, number: int, length: int) -> slice:
    """Return the places of a line of `length` whose mean is number `index` of `number` means."""
    return slice(index * length // number, -(-(index + 1) * length // number))
