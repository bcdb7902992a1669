"""--tokenizer: a model with a tokenizer from elsewhere, and --chat-template with a GGUF file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tokenizers

from pagewick import LLM, SamplingParams
from pagewick.api_arguments import load_text
from pagewick.config import EngineConfig
from pagewick.demo import MODEL_DIR
from pagewick.errors import ModelLoadError
from pagewick.text.chat_template import ChatTemplate
from pagewick.text.tokenizer import Tokenizer
from tests.weights.gguf.demo import write_demo

MESSAGES = [{"role": "user", "content": "What is the default port?"}]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo(tmp_path_factory.mktemp("gguf") / "demo-Q8_0.gguf")


@pytest.fixture(scope="module")
def unreadable(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a tokenizer of an unknown kind."""
    data = gguf.read_bytes()
    start = data.index(b"gpt2", data.index(b"tokenizer.ggml.model"))
    path = tmp_path_factory.mktemp("unreadable") / "demo-Q8_0.gguf"
    path.write_bytes(data[:start] + b"abcd" + data[start + 4 :])
    return path


def loaded(model: Path, tokenizer: Path | None, chat_template: str | None = None) -> tuple[Tokenizer, str]:
    """Return the tokenizer, and a prompt."""
    config = EngineConfig(model=str(model), tokenizer=None if tokenizer is None else str(tokenizer))
    found, template, *_ = load_text(config, chat_template)
    assert isinstance(template, ChatTemplate)
    return found, template.render(MESSAGES).text


def test_a_directory_in_place_of_a_tokenizer_that_cannot_be_read(unreadable: Path, gguf: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"demo-Q8_0\.gguf has a tokenizer of the kind 'abcd'.*\n.*--tokenizer"):
        loaded(unreadable, None)
    (tokenizer, prompt), (own, expected) = loaded(unreadable, MODEL_DIR), loaded(gguf, None)
    assert prompt == expected
    assert tokenizer.encode(prompt, add_special_tokens=False) == own.encode(prompt, add_special_tokens=False)
    # The model's tokens end a response, also where the other files name fewer.
    assert (
        set(tokenizer.eos_token_ids) == set(own.eos_token_ids) > set(Tokenizer.from_directory(MODEL_DIR).eos_token_ids)
    )


def test_a_single_file_has_the_models_chat_template(gguf: Path, tmp_path: Path) -> None:
    file = tmp_path / "words.json"
    shutil.copy(MODEL_DIR / "tokenizer.json", file)
    tokenizer, prompt = loaded(gguf, file)
    assert prompt == loaded(gguf, None)[1]
    assert tokenizer.encode("Hello", add_special_tokens=False)
    # That of a directory is found in any of its places.
    (tmp_path / "model").mkdir()
    for path in MODEL_DIR.iterdir():
        (tmp_path / "model" / path.name).symlink_to(path)
    (tmp_path / "model" / "chat_template.jinja").write_text("model: {{ messages[0].content }}")
    assert loaded(tmp_path / "model", file)[1] == "model: What is the default port?"


def test_the_tokenizers_chat_template_goes_first(gguf: Path, tmp_path: Path) -> None:
    shutil.copy(MODEL_DIR / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("its own: {{ messages[0].content }}")
    assert loaded(gguf, tmp_path)[1] == "its own: What is the default port?"
    assert loaded(gguf, tmp_path, "given: {{ messages[0].content }}")[1] == "given: What is the default port?"


def test_a_gguf_file_as_the_tokenizer_of_a_directory(gguf: Path) -> None:
    tokenizer, prompt = loaded(MODEL_DIR, gguf)
    assert prompt == loaded(MODEL_DIR, None)[1]
    assert tokenizer.eos_token_ids == Tokenizer.from_directory(MODEL_DIR).eos_token_ids


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("notes.txt", "x", r"notes\.txt is no tokenizer\n  give a tokenizer\.json"),
        ("tokenizer.json", "x", r"tokenizer\.json"),
        ("tokenizer.model", "x", r"tokenizer\.model"),
        ("vocab.json", "{}", "no vocab.json with merges.txt"),
        ("x/y", "", "has no tokenizer.json"),
    ],
)
def test_what_is_no_tokenizer(name: str, content: str, complaint: str, gguf: Path, tmp_path: Path) -> None:
    place = tmp_path / name
    place.parent.mkdir(exist_ok=True)
    if content:
        place.write_text(content)
    with pytest.raises(ModelLoadError, match=complaint):
        loaded(gguf, place if content else place.parent)


def test_a_tokenizer_of_another_model(tmp_path: Path, gguf: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    backend.add_tokens([f"<extra_{number}>" for number in range(5000)])
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelLoadError, match=r"does not belong to its model.*\n  give the model's own tokenizer with"):
        loaded(gguf, tmp_path)


def test_a_model_responds_with_another_tokenizer(unreadable: Path, gguf: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    texts = []
    for model, options in ((gguf, {}), (unreadable, {"tokenizer": MODEL_DIR, "speculative_model": gguf})):
        with LLM(model, kv_cache_memory="16MiB", **options) as llm:
            texts.append(llm.chat(MESSAGES, params)[0].outputs[0].text)
    assert texts[0] == texts[1] != ""
