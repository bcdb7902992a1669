"""A whole model of Moondream's kind: from files to the tokens of the reference, and prompts that it cannot read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pagewick import LLM, SamplingParams
from pagewick.errors import InvalidRequestError, ModelLoadError
from tests.images.pictures import address_of, file_of, noise
from tests.models.checkpoints import VARIANTS, make_model, save
from tests.models.moondream import Reference
from tests.tiny_text import byte_level_backend

MARKS = [f"<|md_reserved_{number}|>" for number in range(6)]
BACKEND = byte_level_backend()
BACKEND.add_special_tokens(MARKS)
BOS, MARK, IMAGE = BACKEND.token_to_id("<s>"), BACKEND.token_to_id(MARKS[0]), BACKEND.token_to_id(MARKS[5])
NUM_IMAGE_TOKENS, NUM_TOKENS = 25, 8
PICTURES = [noise(15, 17), noise(40, 9, seed=2)]
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def encode(text: str) -> list[int]:
    return BACKEND.encode(text, add_special_tokens=False).ids


TEMPLATES = {
    "query": {"prefix": [MARK, *encode("query"), MARK + 1], "suffix": [MARK + 2]},
    "caption": {name: [MARK, *encode("hello"), MARK + 1, *encode(name), MARK + 2] for name in ("short", "normal")},
}
TOKENS = {"bos_id": BOS, "eos_id": BOS, "answer_id": MARK + 2, "size_id": IMAGE, "templates": TEMPLATES}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    directory = tmp_path_factory.mktemp("tiny-moondream")
    entries = VARIANTS["moondream"].all_entries()
    phi = make_model("moondream", {**entries, "vocab_size": BACKEND.get_vocab_size() + 5})
    save(phi, directory)
    BACKEND.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<s>"}))
    # That of the repository is of older revisions.
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    config = json.loads((directory / "config.json").read_text())
    config["config"]["tokenizer"] = TOKENS
    (directory / "config.json").write_text(json.dumps(config))
    return directory, Reference(directory, phi)


@pytest.fixture(scope="module")
def llm(reference: tuple[Path, Reference]) -> Iterator[LLM]:
    with LLM(str(reference[0]), dtype="float32", max_model_len=200) as model:
        yield model


def part(picture: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address_of(file_of(picture))}}


def user(*parts: Any) -> list[dict[str, Any]]:
    found = [{"type": "text", "text": one} if isinstance(one, str) else part(one) for one in parts]
    return [{"role": "user", "content": found}]


def check(by: Reference, answer: Any, prompt: list[int], picture: Image.Image | None) -> None:
    """The prompt has these tokens, and the answer consists of those that the reference finds the likeliest."""
    assert list(answer.prompt_token_ids) == prompt
    found = list(answer.outputs[0].token_ids)
    assert len(found) == NUM_TOKENS
    logits = by.logits([*prompt, *found], picture)[len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == found


def query(text: str, *, has_image: bool = True) -> list[int]:
    """The tokens of a question, as the model's own code puts them together: it ends a question twice."""
    first = [BOS, *[IMAGE] * NUM_IMAGE_TOKENS * has_image]
    return [*first, *TEMPLATES["query"]["prefix"], *encode(text), *TEMPLATES["query"]["suffix"] * 2]


def test_questions_are_answered_as_by_the_reference(llm: LLM, reference: tuple[Path, Reference]) -> None:
    answers = llm.chat([user("lazy dog?", PICTURES[0]), user(PICTURES[1], "fox"), user("The fox")], PARAMS)
    for answer, (text, picture) in zip(
        answers, [("lazy dog?", PICTURES[0]), ("fox", PICTURES[1]), ("The fox", None)], strict=True
    ):
        check(reference[1], answer, query(text, has_image=picture is not None), picture)
    # Words of a user's are no tokens of control.
    (answer,) = llm.chat(user(f"{MARKS[2]} {MARKS[5]}", PICTURES[0]), PARAMS)
    written = list(answer.prompt_token_ids or ())[1 + NUM_IMAGE_TOKENS + len(TEMPLATES["query"]["prefix"]) : -2]
    assert written and not {MARK + 2, IMAGE} & {*written} and BACKEND.decode(written) == f"{MARKS[2]} {MARKS[5]}"


def test_an_image_alone_gets_a_caption(llm: LLM, reference: tuple[Path, Reference]) -> None:
    first = [BOS, *[IMAGE] * NUM_IMAGE_TOKENS]
    (answer,) = llm.chat(user(PICTURES[0]), PARAMS)
    check(reference[1], answer, [*first, *TEMPLATES["caption"]["normal"]], PICTURES[0])
    (answer,) = llm.chat(user(PICTURES[0], " "), PARAMS, chat_template_kwargs={"caption": "short"})
    check(reference[1], answer, [*first, *TEMPLATES["caption"]["short"]], PICTURES[0])


def test_prompts_with_a_place_for_the_image(llm: LLM, reference: tuple[Path, Reference]) -> None:
    for prompt in (f"{MARKS[5]}a b", [BOS, IMAGE, *encode("a b")]):
        given = {"prompt_token_ids" if isinstance(prompt, list) else "prompt": prompt}
        if isinstance(prompt, str):
            given["prompt"] = "<s>" + prompt
        (answer,) = llm.generate([{**given, "multi_modal_data": {"image": PICTURES[1]}}], PARAMS)
        check(reference[1], answer, [BOS, *[IMAGE] * NUM_IMAGE_TOKENS, *encode("a b")], PICTURES[1])
    said = "the place of the image .* is token 2 of the prompt.* needs it at 1"
    with pytest.raises(InvalidRequestError, match=said):
        llm.generate([{"prompt": f"<s>a{MARKS[5]}", "multi_modal_data": {"image": PICTURES[1]}}], PARAMS)


@pytest.mark.parametrize(
    ("messages", "variables", "said"),
    [
        (user(*PICTURES, "a"), {}, "this model reads one image"),
        ([{"role": "system", "content": "a"}, *user("b")], {}, "this model answers one question"),
        ([*user("a"), *user("b")], {}, "this model answers one question"),
        ([*user("a"), {"role": "assistant", "content": "b"}, *user("c")], {}, "this model answers one question"),
        ([*user("a"), {"role": "assistant", "content": "b"}], {}, "this model answers one question"),
        (user(" "), {}, "the message needs a question, or an image"),
        (user(PICTURES[0], "a"), {"caption": "short"}, "a caption is made of an image alone"),
        (user("a"), {"caption": "short"}, "a caption is made of an image alone"),
        (user(PICTURES[0]), {"caption": "long"}, "caption must be one of short, normal"),
    ],
)
def test_other_conversations_are_refused(llm: LLM, messages: Any, variables: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        llm.chat(messages, PARAMS, chat_template_kwargs=variables)


def test_an_answer_that_has_begun_goes_on(llm: LLM, reference: tuple[Path, Reference]) -> None:
    begun = [*user(PICTURES[0], "a"), {"role": "assistant", "content": "quick fox"}]
    how: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    check(reference[1], llm.chat(begun, PARAMS, **how)[0], [*query("a"), *encode("quick fox")], PICTURES[0])


def test_a_response_ends_at_the_token_of_the_config(llm: LLM) -> None:
    """Token 9 of generation_config.json is one like any other."""
    assert llm.info.eos_token_ids == [BOS]


def test_a_tokenizer_of_older_revisions_is_refused(reference: tuple[Path, Reference], tmp_path: Path) -> None:
    directory = reference[0]
    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(directory / name)
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelLoadError, match="give --tokenizer moondream/starmie-v1"):
        LLM(str(tmp_path), dtype="float32")
    with LLM(str(tmp_path), tokenizer=str(directory / "tokenizer.json"), dtype="float32", max_model_len=200) as model:
        assert list(model.chat(user("a"), PARAMS)[0].prompt_token_ids or ()) == query("a", has_image=False)


def test_weights_are_quantized_at_load(llm: LLM, reference: tuple[Path, Reference]) -> None:
    options: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 200,
        "quantization": "q8_0",
        "quantized_cache": False,
    }
    with LLM(str(reference[0]), **options) as model:
        assert model.info.weights.startswith("Q8_0")
        (answer,) = model.chat(user(PICTURES[0], "lazy dog?"), PARAMS)
    assert answer.prompt_token_ids == query("lazy dog?") and len(answer.outputs[0].token_ids) == NUM_TOKENS
