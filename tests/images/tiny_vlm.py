"""A whole model that reads images: a random Qwen3-VL with a tokenizer, a chat template and settings."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.images.reading_model import PAD, PAD_ID, TEMPLATE, TOKENIZER
from tests.models.checkpoints import IMAGE_MEAN, IMAGE_STD, VARIANTS, make_model, save
from tests.tiny_text import byte_level_backend

READY = re.compile(r"ready on (http://\S+)")
# 4 x 4 pixels are a patch, and 2 x 2 patches a token.
SIDE = 8
MIN_PIXELS, MAX_PIXELS = 4 * SIDE**2, 60 * SIDE**2


def write_tiny_vlm(directory: Path, name: str = "qwen3-vl") -> nn.Module:
    """Write the model, and return that of transformers to compare with."""
    entries = VARIANTS[name].all_entries()
    text = {**entries["text_config"], "vocab_size": len(TOKENIZER.added_tokens) + 1200}
    model = make_model(name, {**entries, "text_config": text, "image_token_id": PAD_ID})
    save(model, directory)
    write_text_files(directory)
    return model


def write_text_files(directory: Path) -> None:
    """Write the tokenizer and the chat template beside a model, and limit the pixels of its images."""
    backend = byte_level_backend()
    backend.add_special_tokens(["<|vision_start|>", PAD, "<|vision_end|>"])
    backend.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    path = directory / "preprocessor_config.json"
    size = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    path.write_text(json.dumps({**json.loads(path.read_text()), "size": size}))


@contextmanager
def serving(directory: Path, *flags: str) -> Iterator[str]:
    """Serve the model in a process of its own; yields its address."""
    command = [sys.executable, "-m", "pagewick", "serve", str(directory), "--port", "0", "--dtype", "float32"]
    process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as stdout:
        yield next(match[1] for line in stdout if (match := READY.search(line)))
        process.terminate()
    assert process.wait(30) == 0


def next_tokens(model: nn.Module, pieces: Sequence[Any], num_tokens: int) -> list[int]:
    """Return the tokens with which transformers continues a prompt of texts and images (PIL), always the likeliest."""
    processor = Qwen2VLImageProcessorPil(
        patch_size=SIDE // 2, merge_size=2, image_mean=IMAGE_MEAN, image_std=IMAGE_STD,
        size={"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
    )  # fmt: skip
    images = [piece for piece in pieces if not isinstance(piece, str)]
    given: Mapping[str, Any] = processor(images, return_tensors="pt")
    grids = iter(given["image_grid_thw"].tolist())
    token_ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, str):
            token_ids += TOKENIZER.encode(piece, add_special_tokens=False)
        else:
            _, rows, columns = next(grids)
            token_ids += [PAD_ID] * (rows * columns // 4)
    num_prompt_tokens = len(token_ids)
    for _ in range(num_tokens):
        ids = torch.tensor([token_ids])
        types = (ids == PAD_ID).long()
        types[:, num_prompt_tokens:] = 0
        with torch.inference_mode():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=types, **given).logits
        token_ids.append(int(logits[0, -1].argmax()))
    return token_ids[num_prompt_tokens:]
