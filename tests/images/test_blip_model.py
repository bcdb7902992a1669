"""BLIP as a whole: from an image's file and the beginning of its caption to the tokens of transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

from pagewick import LLM, SamplingParams
from pagewick.errors import InvalidRequestError, ModelLoadError
from pagewick.images.settings_files import read_settings
from pagewick.text.tokenizer import Tokenizer
from tests.images.pictures import address_of, file_of, noise
from tests.models.captions import NUM_TOKENS, SIDE, write_captioner
from tests.models.word_pieces import word_pieces

PARAMS = SamplingParams(temperature=0, max_tokens=9, min_tokens=9)
IMAGES = [noise(50, 31), noise(24, 24)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("blip")
    made = word_pieces()
    ids = {f"{name}_token_id": made.token_to_id(token) for name, token in (("pad", "[PAD]"), ("sep", "[SEP]"))}
    # Published tokenizers end before the token that begins a caption.
    write_captioner(found, bos_token_id=made.get_vocab_size(), **ids)
    made.save(str(found / "tokenizer.json"))
    (found / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": true}')
    return found


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(str(directory), dtype="float32") as found:
        yield found


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    """transformers' model; the same weights."""
    import transformers

    return transformers.BlipForConditionalGeneration.from_pretrained(directory).eval()


def by_transformers(reference: Any, directory: Path, image: Image.Image, text: str | None) -> list[int]:
    """The tokens that generate appends."""
    values = BlipImageProcessorPil.from_pretrained(directory)(image, return_tensors="pt")["pixel_values"]
    given = None if text is None else torch.tensor([word_pieces().encode(text).ids])
    found = reference.generate(values, given, max_new_tokens=9, min_new_tokens=9, do_sample=False)[0].tolist()
    return found[1 if given is None else given.shape[1] - 1 :]  # type: ignore[no-any-return]


def message(text: str | None, *images: Image.Image) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": address_of(file_of(one))}} for one in images
    ]
    return [{"role": "user", "content": parts + ([] if text is None else [{"type": "text", "text": text}])}]


@pytest.mark.parametrize("text", [None, "The capital of China", "gravity"])
def test_captions_are_those_of_transformers(llm: LLM, reference: Any, directory: Path, text: str | None) -> None:
    expected = [by_transformers(reference, directory, image, text) for image in IMAGES]
    assert expected[0] != expected[1]
    chats = [message(text, image) for image in IMAGES]
    prompts: list[Any] = [{"prompt": text or "", "multi_modal_data": {"image": image}} for image in IMAGES]
    for outputs in (llm.chat(chats, PARAMS), llm.generate(prompts, PARAMS)):
        assert [one.outputs[0].token_ids for one in outputs] == expected
        assert all(one.prompt_token_ids.count(0) == NUM_TOKENS for one in outputs)


def test_a_caption_ends_with_its_last_token(llm: LLM, reference: Any, directory: Path) -> None:
    sep = word_pieces().token_to_id("[SEP]")
    (output,) = llm.chat(message(None, IMAGES[0]), SamplingParams(temperature=0, logit_bias={sep: 100}))
    assert output.outputs[0].finish_reason == "stop" and output.outputs[0].text == ""


def test_the_name_of_a_token_in_a_text_is_text(llm: LLM) -> None:
    (output,) = llm.chat(message("a [PAD] [SEP] [DEC]", IMAGES[0]), PARAMS)
    ids = output.prompt_token_ids
    assert ids is not None and ids.count(0) == NUM_TOKENS and ids.count(word_pieces().token_to_id("[SEP]")) == 0


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (message("a force"), "one image, and the request has 0"),
        (message("a force", *IMAGES), "this model reads one image of a request, and this one has 2"),
        ([*message(None, IMAGES[0]), {"role": "assistant", "content": "a"}], "reads one message of the user"),
        ([{"role": "system", "content": "a"}, *message(None, IMAGES[0])], "reads one message of the user"),
    ],
)
def test_other_requests_are_refused(llm: LLM, messages: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        llm.chat(messages, PARAMS)


def test_a_text_without_an_image_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="one image, and the request has 0"):
        llm.generate("a force", PARAMS)


def test_settings(directory: Path, tmp_path: Path) -> None:
    settings = read_settings(directory)
    assert settings.num_tokens(500, 300) == settings.max_tokens == NUM_TOKENS
    (view,) = settings.views(500, 300)
    assert view.sizes == ((SIDE, SIDE),)
    config = json.loads((directory / "config.json").read_text())
    usual = json.loads(json.dumps(BlipImageProcessorPil().to_dict()))
    (tmp_path / "config.json").write_text(json.dumps({**config, "vision_config": {}}))
    whole = []
    for entries in (usual, {"image_processor_type": "BlipImageProcessor"}):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(entries))
        whole.append(read_settings(tmp_path))
    assert whole[0] == whole[1] and whole[0].max_tokens == 608
    for wrong, said in (
        ({"size": {"height": 224, "width": 224}}, "224 x 224 pixels, and vision_config.image_size .* is 384"),
        ({"do_pad": True}, "do_pad"),
        ({"do_center_crop": True}, "do_center_crop"),
        ({"do_resize": False}, "do_resize"),
    ):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({**usual, **wrong}))
        with pytest.raises(ModelLoadError, match=said):
            read_settings(tmp_path)


def test_pixels_are_those_of_transformers(directory: Path) -> None:
    from pagewick.images.decoding import prepare

    settings = read_settings(directory)
    mean, std = torch.tensor(settings.mean), torch.tensor(settings.std)
    for image in IMAGES:
        (found,) = prepare(file_of(image), settings)
        expected = BlipImageProcessorPil.from_pretrained(directory)(image, return_tensors="pt")["pixel_values"][0]
        normed = (torch.from_numpy(found.pixels.copy()) * settings.rescale_factor - mean) / std
        torch.testing.assert_close(normed.permute(2, 0, 1), expected, atol=1e-5, rtol=0)


def test_a_tokenizer_may_know_the_first_token(directory: Path, tmp_path: Path) -> None:
    begin = word_pieces().get_vocab_size()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text((directory / name).read_text())
    listed = {"added_tokens_decoder": {str(begin): {"content": "[START]", "special": True}}}
    for entries, token in (({}, "[DEC]"), (listed, "[START]")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(entries))
        tokenizer = Tokenizer.from_directory(tmp_path)
        assert tokenizer.id_of(token) == begin and tokenizer.start_token_ids == [0, begin]
        assert tokenizer.config["chat_template"].count(token) == 1
    (tmp_path / "tokenizer_config.json").write_text("{}")
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["pad_token_id"] = begin + 7
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=f"no token {begin + 7}, pad_token_id"):
        Tokenizer.from_directory(tmp_path)
