"""GrammarQueue: grammars of requests, compiled for the tokenizer that texts are encoded with."""

from __future__ import annotations

import json
import subprocess
import sys

from pagewick.config import EngineConfig
from pagewick.demo import MODEL_DIR
from pagewick.grammar_queue import Compiled, GrammarQueue
from pagewick.text.grammars.constraint import GrammarSpec


def test_a_given_tokenizer_replaces_that_of_the_model() -> None:
    vocab_size = json.loads((MODEL_DIR / "config.json").read_text())["vocab_size"]
    done: list[Compiled] = []
    queue = GrammarQueue(EngineConfig(model="/no/such/model", tokenizer=str(MODEL_DIR)), done.append)
    compiled = queue.compiler.compile(GrammarSpec(grammar='start: "a"'), vocab_size)
    assert not compiled.matcher.is_error()


def test_an_engine_without_grammars_imports_neither_llguidance_nor_tokenizers() -> None:
    script = (
        "import sys, pagewick.engine_process as p; from pagewick.config import EngineConfig; "
        "p.GrammarQueue(EngineConfig(model='x'), print); print({'llguidance', 'tokenizers'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"
