"""LLM answers conversations with images from a pair of GGUF files as it does from the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pagewick.kernels import cpu
from pagewick.llm import LLM
from pagewick.sampling_params import SamplingParams
from pagewick.text.gguf_vocabulary import gguf_vocabulary
from tests.images.pictures import noise
from tests.images.reading_model import PAD_ID, TOKENIZER
from tests.images.tiny_vlm import MAX_PIXELS, MIN_PIXELS, write_text_files
from tests.models.checkpoints import save
from tests.weights.gguf.mixes import Numbers, rewrite
from tests.weights.gguf.vision_models import original, write_pair

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "num_kv_blocks": 40, "num_threads": 1}


def write_checkpoint(directory: Path) -> int:
    """Write the model with the tokenizer of these tests, and rows of the embedding for it; return their number."""
    model: Any = original("qwen3-vl")
    embedding = model.get_input_embeddings()
    vocab_size = TOKENIZER.vocab_size
    rows = torch.randn(vocab_size - len(embedding.weight), embedding.weight.shape[1], generator=torch.Generator())
    embedding.weight = nn.Parameter(torch.cat([embedding.weight, rows / 4]))
    model.config.text_config.vocab_size, model.config.image_token_id = vocab_size, PAD_ID
    model.tie_weights()
    save(model, directory)
    write_text_files(directory)
    return vocab_size


def write_files(checkpoint: Path, directory: Path, vocab_size: int) -> Path:
    """Write the same model as two files; return that of the text part."""
    pair = write_pair("qwen3-vl", directory)
    text, vision = directory / "model" / "m-F32.gguf", directory / "model" / "mmproj-F32.gguf"
    text.parent.mkdir()
    from safetensors.torch import load_file

    embedding = load_file(checkpoint / "model.safetensors")["model.language_model.embed_tokens.weight"].numpy()

    def extended(name: str, numbers: Numbers) -> Iterator[tuple[str, Numbers, str]]:
        if name == "token_embd.weight":
            assert np.array_equal(embedding[: len(numbers)], numbers)
            numbers = embedding
        yield name, numbers, "F32"

    rewrite(pair.text, text, extended, gguf_vocabulary(checkpoint, vocab_size)[0])
    limits = {"clip.vision.image_min_pixels": MIN_PIXELS, "clip.vision.image_max_pixels": MAX_PIXELS}
    rewrite(pair.vision, vision, lambda name, numbers: [(name, numbers, "F32")], limits)
    return text


@pytest.mark.skipif(cpu.library() is None, reason="without the native library, products are torch's")
def test_conversations_with_images(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    text = write_files(checkpoint, tmp_path, write_checkpoint(checkpoint))
    images = [noise(61, 33, seed=1), noise(200, 300, seed=2)]
    conversations: list[Any] = [
        [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]}]
        for image in images
    ]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    found = []
    for model in (checkpoint, text):
        llm = LLM(str(model), **OPTIONS)
        outputs = llm.chat(conversations, params)
        found.append([(one.prompt_token_ids, one.outputs[0].token_ids) for one in outputs])
    assert found[0] == found[1]
    numbers = [list(one[0] or []).count(PAD_ID) for one in found[0]]
    # 61 x 33 pixels become 64 x 32; 200 x 300 have more than 60 tokens, and so become 48 x 72.
    assert numbers == [8 * 4, 6 * 9]
