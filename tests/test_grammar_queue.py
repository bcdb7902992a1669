"""GrammarQueue: grammars of requests, compiled for the tokenizer that texts are encoded with."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from pagewick.config import EngineConfig
from pagewick.demo import MODEL_DIR
from pagewick.errors import ModelLoadError
from pagewick.grammar_queue import Compiled, GrammarQueue
from pagewick.text.grammars.constraint import GrammarCompiler, GrammarSpec
from pagewick.text.tokenizer import Tokenizer


def test_a_given_tokenizer_replaces_that_of_the_model() -> None:
    vocab_size = json.loads((MODEL_DIR / "config.json").read_text())["vocab_size"]
    done: list[Compiled] = []
    queue = GrammarQueue(EngineConfig(model="/no/such/model", tokenizer=str(MODEL_DIR)), done.append)
    compiled = queue.compiler.compile(GrammarSpec(grammar='start: "a"'), vocab_size)
    assert not compiled.matcher.is_error()


def test_the_vocabulary_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[int] = []
    done = threading.Event()

    def prepare(compiler: GrammarCompiler, vocab_size: int) -> None:
        prepared.append(vocab_size)
        done.set()
        raise ModelLoadError("there is no tokenizer")

    monkeypatch.setattr(GrammarCompiler, "prepare", prepare)
    queue = GrammarQueue(EngineConfig(), lambda compiled: None)
    assert not queue.is_prepared
    queue.prepare(7)
    queue.prepare(7)
    assert queue.is_prepared and done.wait(30)
    assert prepared == [7]


def test_a_prepared_compiler_reads_no_tokenizer_for_its_first_grammar() -> None:
    loaded = []

    def load() -> Tokenizer:
        loaded.append(1)
        return Tokenizer.from_directory(MODEL_DIR)

    vocab_size = json.loads((MODEL_DIR / "config.json").read_text())["vocab_size"]
    compiler = GrammarCompiler(load, 4)
    compiler.prepare(vocab_size)
    assert loaded == [1]
    assert not compiler.compile(GrammarSpec(grammar='start: "a"'), vocab_size).matcher.is_error()
    assert loaded == [1]


def test_an_engine_without_grammars_imports_neither_llguidance_nor_tokenizers() -> None:
    script = (
        "import sys, pagewick.engine_process as p; from pagewick.config import EngineConfig; "
        "p.GrammarQueue(EngineConfig(model='x'), print); print({'llguidance', 'tokenizers'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"
