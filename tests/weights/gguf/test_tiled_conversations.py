"""LLM answers conversations with tiles from a pair of GGUF files as it does from the checkpoint.

llama.cpp's converter wrote the part that sees, and Pagewick the text part, with the tokenizer of these tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from pagewick import LLM
from pagewick.outputs import RequestOutput
from pagewick.sampling_params import SamplingParams
from tests.images.pictures import noise
from tests.images.test_tiled_models import FAMILIES, Family
from tests.weights.gguf.test_images import exact
from tests.weights.gguf.test_tiled_images import write_checkpoint
from tests.weights.gguf.vision_models import ALL, original, write_pair
from tests.weights.gguf.written import write

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 2048, "num_kv_blocks": 256, "num_threads": 1}
# Tiles of LFM2-VL have 512 x 512 pixels: 2 x 1, and the whole.
LARGE = noise(1000, 600)
# The others' vision parts are not read from GGUF files.
READ = [family for family in FAMILIES if family.variant in ALL]


def with_rows(weight: torch.Tensor, count: int) -> nn.Parameter:
    """Add rows to an embedding or a head."""
    rows = torch.randn(count - len(weight), weight.shape[1], generator=torch.Generator().manual_seed(1))
    return nn.Parameter(torch.cat([weight, (rows * 4).round() / 16]))


def write_whole(family: Family, directory: Path) -> None:
    """Write the checkpoint with the family's tokenizer, and rows of the embedding for it."""
    model: Any = original(family.variant)
    count = family.settings.TOKENIZER.vocab_size + 9
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        if len(layer.weight) < count:
            layer.weight = with_rows(layer.weight, count)
    text = model.config.text_config
    text.vocab_size, text.max_position_embeddings = count, OPTIONS["max_model_len"]
    model.config.image_token_id = family.settings.IMAGE_ID
    model.tie_weights()
    write_checkpoint(family.variant, directory, model)
    family.backend.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": family.settings.TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def logprobs_of(answer: RequestOutput) -> list[float]:
    return [one.logprob for position in answer.outputs[0].logprobs or () for one in position.values()]


@exact
@pytest.mark.parametrize("family", READ, ids=lambda family: family.variant)
def test_conversations_with_tiles(family: Family, tmp_path: Path) -> None:
    write_whole(family, tmp_path / "checkpoint")
    pair = write_pair(family.variant, tmp_path)
    text = write(tmp_path / "checkpoint", tmp_path / "text.gguf", "f32")
    pictures: list[Image.Image] = [*family.pictures[:2], *([LARGE] if family.variant == "lfm2-vl" else [])]
    parts = [{"type": "image", "image": picture} for picture in pictures]
    conversations: list[Any] = [
        [{"role": "user", "content": [{"type": "text", "text": "a\n"}, *parts]}],
        [{"role": "user", "content": "a"}],
    ]
    prompt = {"prompt": f"a{family.placeholder}", "multi_modal_data": {"image": pictures[-1]}}
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    found = []
    for model, mmproj in ((tmp_path / "checkpoint", None), (text, str(pair.vision))):
        with LLM(str(model), mmproj=mmproj, **OPTIONS) as llm:
            outputs = [*llm.chat(conversations, params), *llm.generate([prompt], params)]
        found.append([(one.prompt_token_ids, one.outputs[0].token_ids, logprobs_of(one)) for one in outputs])
    assert found[0] == found[1]
    numbers = [list(ids or ()).count(family.settings.IMAGE_ID) for ids, *_ in found[0]]
    assert numbers[1] == 0 and numbers[0] > numbers[2] > 4, "the last picture was cut"
