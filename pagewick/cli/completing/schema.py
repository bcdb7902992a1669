"""The file of `pagewick complete --json-schema`, which is checked before a model is loaded."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

from pagewick.cli.text_input import read_text, unreadable
from pagewick.config import EngineConfig
from pagewick.errors import ConfigError, InvalidRequestError
from pagewick.structured_outputs import StructuredOutputsParams
from pagewick.text.grammars.checker import GrammarChecker
from pagewick.text.grammars.grammar import grammar_of, whole_grammar
from pagewick.text.grammars.limits import GrammarLimits


def read_schema(path: Path, config: EngineConfig) -> str:
    """Return the schema in a file. Raises ConfigError for a file without a schema that can be honoured."""
    try:
        text = read_text(path)
        json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--json-schema: cannot read {path}: {unreadable(error)}; check the path") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--json-schema: {path} is not valid JSON: {error}") from None
    limits = GrammarLimits.of(config)
    # The tokens of a vocabulary make no difference to a schema; single bytes, which it always has, are enough.
    with closing(GrammarChecker({}, 0, limits.timeout_s)) as checker:
        try:
            grammar = grammar_of(StructuredOutputsParams(json=text), limits)
            checker.check(whole_grammar(grammar, None), grammar.param)
        except InvalidRequestError as error:
            reason = str(error).removeprefix("structured_outputs ")
            raise ConfigError(f"--json-schema: {path} {reason}") from None
    return text
