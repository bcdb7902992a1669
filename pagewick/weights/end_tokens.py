"""The token that a checkpoint's tokenizer names as the end of a sequence, from its JSON files. Imports no torch.

Many fine-tuned models end their answers with it (`<|im_end|>`, `<|eot_id|>`), while generation_config.json still has
the end token of the model that they come from, or is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pagewick.weights.files import GGUF_SUFFIX, read_json_object

# Files of which the first that names an end token counts.
_NAMING: Final = ("tokenizer_config.json", "special_tokens_map.json")
_TOKENIZER: Final = "tokenizer.json"
_MAX_BYTES: Final = 256 * 2**20


def tokenizer_end_ids(place: Path) -> list[int]:
    """Return the id of the eos_token of a tokenizer; empty if its files do not say, and for a GGUF file.

    place: a model directory, or a file of a tokenizer, which may lie beside others. Raises ModelLoadError for files
    that are no JSON.
    """
    if place.suffix == GGUF_SUFFIX:
        return []
    directory = place if place.is_dir() else place.parent
    text = next(filter(None, (_text(_read(directory / name).get("eos_token")) for name in _NAMING)), None)
    if text is None:
        return []
    # tokenizer.json has several MB, and most tokenizers do without it.
    token_id = next((found for found in _ids_of(directory, text) if type(found) is int), None)
    return [] if token_id is None else [token_id]


def _ids_of(directory: Path, text: str) -> Iterator[Any]:
    """Yield the token's id from each of the files that have it, the smallest file first."""
    listed = _read(directory / "tokenizer_config.json").get("added_tokens_decoder")
    for token_id, token in listed.items() if isinstance(listed, dict) else ():
        if _text(token) == text and token_id.isdecimal():
            yield int(token_id)
    yield _read(directory / "added_tokens.json").get(text)
    content = _read(directory / _TOKENIZER)
    added = content.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and token.get("content") == text:
            yield token.get("id")
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    yield vocabulary.get(text) if isinstance(vocabulary, dict) else None


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path, _MAX_BYTES) if path.is_file() else {}


def _text(token: Any) -> str | None:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None
