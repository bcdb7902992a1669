"""The conversations for calibration, as a model reads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pagewick.cli.converting.text import BUILTIN, calibration_tokens
from pagewick.demo import MODEL_DIR
from pagewick.errors import ConfigError
from pagewick.text.tokenizer import Tokenizer
from training.corpus import held_out_questions


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(MODEL_DIR)


def test_a_model_reads_conversations_in_its_own_template(tokenizer: Tokenizer) -> None:
    token_ids = calibration_tokens(None, MODEL_DIR, 4096, 2048, seed=0)
    assert sum(map(len, token_ids)) == 4096 and len(token_ids) > 10
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in token_ids]
    assert all(text.startswith("<|im_start|>") for text in texts)
    assert sum(text.endswith("<|im_end|>\n") for text in texts) > len(texts) / 2
    assert calibration_tokens(None, MODEL_DIR, 4096, 2048, seed=1) != token_ids
    assert max(map(len, calibration_tokens(None, MODEL_DIR, 4096, 50, seed=0))) == 50


def test_the_built_in_text_has_an_end() -> None:
    with pytest.raises(ConfigError, match=r"the built-in text has \d+ tokens, and 10000000 are wanted"):
        calibration_tokens(None, MODEL_DIR, 10**7, 2048, seed=0)


def test_a_template_may_reject_some_conversations(tmp_path: Path) -> None:
    shutil.copytree(MODEL_DIR, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for message in messages %}{% if message.role not in ('user', 'assistant') %}"
        "{{ raise_exception('only users and assistants') }}{% endif %}[{{ message.content }}]{% endfor %}"
    )
    with pytest.raises(ConfigError) as failure:
        calibration_tokens(None, tmp_path, 10**7, 2048, seed=0)
    everything = int(str(failure.value).rpartition(" ")[2])
    texts = calibration_tokens(None, tmp_path, everything, 2048, seed=0)
    accepted = [
        all(message["role"] in ("user", "assistant") for message in json.loads(line)["messages"])
        for line in BUILTIN.read_text(encoding="utf-8").splitlines()
    ]
    assert 0 < len(texts) == sum(accepted) < len(accepted)


def test_a_model_without_a_template_reads_plain_text(tmp_path: Path) -> None:
    settings = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    shutil.copy(MODEL_DIR / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    plain = Tokenizer.from_directory(tmp_path)
    (token_ids, *_) = calibration_tokens(None, tmp_path, 300, 2048, seed=0)
    assert "<|im_start|>" not in plain.decode(token_ids, skip_special_tokens=False)


def test_no_conversation_is_held_out() -> None:
    asked = {question.text for question in held_out_questions()}
    for line in BUILTIN.read_text(encoding="utf-8").splitlines():
        assert not asked & {message["content"] for message in json.loads(line)["messages"]}
