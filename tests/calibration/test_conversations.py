"""The conversations for calibration, as a model reads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pagewick.demo import MODEL_DIR
from pagewick.text.tokenizer import Tokenizer
from tests.calibration.conversations import conversation_token_ids
from tests.calibration.write_conversations import OUTPUT
from training.corpus import held_out_questions


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(MODEL_DIR)


def test_a_model_reads_conversations_in_its_own_template(tokenizer: Tokenizer) -> None:
    token_ids = conversation_token_ids(MODEL_DIR, tokenizer, 4096)
    assert 4096 <= sum(map(len, token_ids)) < 6000 and len(token_ids) > 10
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in token_ids]
    assert all(text.startswith("<|im_start|>") and text.endswith("<|im_end|>\n") for text in texts)
    assert conversation_token_ids(MODEL_DIR, tokenizer, 4096, seed=1) != token_ids


def test_a_template_may_reject_some_conversations(tokenizer: Tokenizer, tmp_path: Path) -> None:
    shutil.copytree(MODEL_DIR, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for message in messages %}{% if message.role not in ('user', 'assistant') %}"
        "{{ raise_exception('only users and assistants') }}{% endif %}[{{ message.content }}]{% endfor %}"
    )
    texts = [
        tokenizer.decode(ids, skip_special_tokens=False) for ids in conversation_token_ids(tmp_path, tokenizer, 10**9)
    ]
    accepted = [
        all(message["role"] in ("user", "assistant") for message in json.loads(line)["messages"])
        for line in OUTPUT.read_text(encoding="utf-8").splitlines()
    ]
    assert 0 < len(texts) == sum(accepted) < len(accepted)


def test_a_model_without_a_template_reads_plain_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    settings = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    shutil.copy(MODEL_DIR / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    plain = Tokenizer.from_directory(tmp_path)
    (token_ids, *_) = conversation_token_ids(tmp_path, plain, 300)
    assert "<|im_start|>" not in plain.decode(token_ids, skip_special_tokens=False)


def test_no_conversation_is_held_out() -> None:
    asked = {question.text for question in held_out_questions()}
    for line in OUTPUT.read_text(encoding="utf-8").splitlines():
        assert not asked & {message["content"] for message in json.loads(line)["messages"]}
