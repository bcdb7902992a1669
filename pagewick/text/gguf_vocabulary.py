"""A model directory's tokenizer and chat templates as a GGUF file's metadata: what gguf_tokenizer.py reads, reversed.

Whatever is written is read back, and compared with the model's own tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers

from pagewick.errors import ModelLoadError
from pagewick.text.chat_template import read_templates
from pagewick.text.gguf_tokenizer import SPECIAL_TOKENS, TEMPLATE, gguf_tokenizer
from pagewick.text.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from pagewick.text.tokenizer_files import apply_config, read_tokenizer, token_text
from pagewick.weights.gguf.vocabulary import TokenType, end_token_ids

_PREFIX: Final = "tokenizer.ggml."
_SPACE: Final = "\u2581"
# The score of every token where merges decide, as llama.cpp's converter writes it.
_NO_SCORE: Final = -1000.0
_BYTE: Final = re.compile(r"<0x[0-9A-F]{2}>")
# Every two ways to split text that have a name in GGUF files differ in one of these lines.
PROBE: Final = (
    "Hello world, it's 3.14 o'clock; I'll say: \"HE'LL'VE won't\"!",
    "1 12 123 1234 12345 1234567890 3rd x86_64 0xFF ²³ ٣٤٥ ४५",
    "  two  spaces,\ttabs\t\tand \n newlines\n\n\n  \r\nend   ",
    "def f(a_b, *args):\n    return {'k': [1, 2]} != None  # http://a.b/c?d=e&f/\n\t\t}\n",
    "camelCase HTTPServer iPhone McDonald ÉCOLE École straße ǅ ÀÉx",
    "你好，世界。今天是2024年！漢字かな交じり文カタカナ 한국어 띄어쓰기",
    "Привет мир ΑΒΓ αβγ العربية، ۔ हिन्दी भाषा ไทยภาษา עברית ա",
    "e\u0301 n\u0303 A\u030a ½ ℵ ™ € £5 $6 +-*/=<>^~|`# @user … — “q” ‘s’ ．，：",
    "🙂🙃👩‍👩‍👧 🇩🇪 \u200b\u00a0\u3000x ...!!!??? ---\n/// a/b\n ;;\r\n",
    "a'S b'T c'RE don't DON'T 'tis 's 'x ''' \u2019s",
    " x\u0300y ᾳ ﬁ Ⅷ ⑧ \u0903\u0904 ー々〆 ㋿ ㍿",
)


def gguf_vocabulary(
    directory: Path, vocab_size: int, *, keeps_merges: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Return the key-values of a model's tokenizer and chat templates, and what readers of the file should know.

    vocab_size: rows of the embedding; the file has a token for each. keeps_merges: files of the architecture have the
    merges of characters, as those of Gemma 4, and no scores. Raises ModelLoadError if the directory has no usable
    tokenizer, or one that a GGUF file cannot describe.
    """
    backend, config, end_ids = read_tokenizer(directory)
    apply_config(backend, config)
    state = json.loads(backend.to_str())
    tokens, types = _tokens(backend, vocab_size)
    model, merges = state["model"], [_pair(merge) for merge in state["model"].get("merges", [])]
    if model["type"] != "BPE":
        raise _cannot(directory, f"is of the kind {model['type']}, and GGUF files have byte pair encoding only")
    if "ByteLevel" in json.dumps(state["pre_tokenizer"]):
        found: dict[str, Any] = {"model": "gpt2", "pre": _name_of_splitting(backend, directory), "tokens": tokens}
        found["merges"] = _known_merges(merges, tokens)
    elif keeps_merges:
        types = _sentencepiece_types(tokens, types, model.get("unk_token"))
        found = {"model": "gemma4", "tokens": tokens, "scores": [_NO_SCORE] * len(tokens), "add_space_prefix": False}
        found["merges"] = _known_merges(merges, tokens)
    else:
        types = _sentencepiece_types(tokens, types, model.get("unk_token"))
        found = {"model": "llama", "pre": "default", "tokens": tokens, "scores": _scores(tokens, merges)}
        found["add_space_prefix"] = backend.encode("a", add_special_tokens=False).tokens[0].startswith(_SPACE)
    found["token_type"] = types
    found |= _special_tokens(backend, config, vocab_size)
    values = {f"{_PREFIX}{key}": value for key, value in found.items()}
    values |= _further_ends(values, end_ids or [])
    values |= {_template_key(name): text for name, text in read_templates(directory, config).items()}
    stored, stored_config = gguf_tokenizer(values, str(directory))
    apply_config(stored, stored_config)
    return values, list(_differences(stored, backend, directory))


def _known_merges(merges: Sequence[tuple[str, str]], tokens: Sequence[str]) -> list[str]:
    known = set(tokens)
    return [" ".join(pair) for pair in merges if known.issuperset((*pair, "".join(pair)))]


def _tokens(backend: tokenizers.Tokenizer, vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the texts and TokenTypes of all ids; ids that have no token get one that no text contains."""
    tokens = [f"[PAD{token_id}]" for token_id in range(vocab_size)]
    types = [int(TokenType.UNUSED)] * vocab_size
    for text, token_id in backend.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size:
            tokens[token_id], types[token_id] = text, int(TokenType.NORMAL)
    for token_id, token in backend.get_added_tokens_decoder().items():
        if token_id < vocab_size:
            types[token_id] = int(TokenType.CONTROL if token.special else TokenType.USER_DEFINED)
    return tokens, types


def _pair(merge: str | Sequence[str]) -> tuple[str, str]:
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first, second


def _sentencepiece_types(tokens: Sequence[str], types: Sequence[int], unknown: str | None) -> list[int]:
    found = []
    for token, kind in zip(tokens, types, strict=True):
        if token == unknown:
            kind = TokenType.UNKNOWN
        elif kind == TokenType.NORMAL and _BYTE.fullmatch(token):
            kind = TokenType.BYTE
        elif kind == TokenType.USER_DEFINED and _SPACE in token:
            # A text has no such character before its spaces are replaced: merges make this token.
            kind = TokenType.NORMAL
        found.append(int(kind))
    return found


def _scores(tokens: Sequence[str], merges: Sequence[tuple[str, str]]) -> list[float]:
    """Return a score for each token, by which pairs are merged in the order of the merges, the highest first."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def _name_of_splitting(backend: tokenizers.Tokenizer, directory: Path) -> str:
    """Return tokenizer.ggml.pre: the first name whose splitting gives the same words, and which merges alike."""
    for name, splitting in PRE_TOKENIZERS.items():
        if splitting.ignores_merges == bool(backend.model.ignore_merges) and _splits_alike(splitting, backend):
            return name
    raise _cannot(directory, "splits text into words in a way that has no name in GGUF files")


def _splits_alike(splitting: PreTokenizer, backend: tokenizers.Tokenizer) -> bool:
    pre_tokenizer = splitting.make()
    for line in PROBE:
        ours, theirs = (
            line if one is None else one.normalize_str(line) for one in (splitting.normalizer, backend.normalizer)
        )
        if ours != theirs or _words(pre_tokenizer, ours) != _words(backend.pre_tokenizer, theirs):
            return False
    return True


def _words(pre_tokenizer: tokenizers.pre_tokenizers.PreTokenizer, text: str) -> list[str]:
    return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]


def _special_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], vocab_size: int) -> dict[str, int | bool]:
    found: dict[str, int | bool] = {}
    for key, name in SPECIAL_TOKENS.items():
        text = token_text(config.get(name))
        token_id = None if text is None else backend.token_to_id(text)
        if token_id is not None and token_id < vocab_size:
            found[key] = token_id
    ids = backend.encode("a").ids
    ends = {"add_bos_token": ids[:1] == [found.get("bos_token_id")]}
    return {**found, **ends, "add_eos_token": ids[-1:] == [found.get("eos_token_id")]}


def _further_ends(values: Mapping[str, Any], end_ids: Sequence[int]) -> dict[str, int]:
    """Return keys for tokens that end a response, beside those that every reader recognises."""
    known = end_token_ids(values)
    further = [token_id for token_id in end_ids if token_id not in known]
    keys = [key for key in ("eos_token_id", "eot_token_id", "eom_token_id") if f"{_PREFIX}{key}" not in values]
    return {f"{_PREFIX}{key}": token_id for key, token_id in zip(keys, further, strict=False)}


def _template_key(name: str) -> str:
    return TEMPLATE if name == "default" else f"{TEMPLATE}.{name}"


def _differences(stored: tokenizers.Tokenizer, backend: tokenizers.Tokenizer, directory: Path) -> Iterator[str]:
    """Yield how the tokenizer that a reader makes differs. Raises ModelLoadError if most texts become other tokens."""
    others = [
        line
        for line in PROBE
        if backend.encode(line, add_special_tokens=False).ids != stored.encode(line, add_special_tokens=False).ids
    ]
    if len(others) > len(PROBE) // 2:
        raise _cannot(directory, f"splits {others[0][:24]!r} in a way that GGUF files cannot describe")
    if others:
        yield f"readers of the file make other tokens of some texts, such as {others[0][:24]!r}"
    ours, theirs = (one.encode("a").tokens for one in (backend, stored))
    if ours != theirs:
        yield f"the tokenizer makes {' '.join(ours)} of the text a, and readers make {' '.join(theirs)} of it"


def _cannot(directory: Path, why: str) -> ModelLoadError:
    return ModelLoadError(f"the tokenizer in {directory} {why}\n  use the checkpoint as it is, with --quantization")
