"""Request bodies that no client should send: valid ones with changes, malformed JSON, and huge ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from random import Random
from typing import Any

import msgspec

from pagewick.server.api.classification import ClassificationRequest
from pagewick.server.api.embeddings import EmbeddingRequest
from pagewick.server.api.known_fields import UNSUPPORTED
from pagewick.server.api.openai import CLASSIFY_PATHS, RERANK_PATHS, SCORE_PATHS
from pagewick.server.api.protocol import ChatCompletionRequest, CompletionRequest
from pagewick.server.api.reranking import RerankRequest, ScoreRequest
from pagewick.server.api.text_routes import ApplyTemplateRequest, DetokenizeRequest, TokenizeRequest

DEEP = 100_000
MANY_KEYS = 100_000
# Stands for the number 1e309, which the json module cannot write.
TOO_LARGE = "@1e309@"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
# Small requests: those that are still valid after the changes are answered soon.
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2, "temperature": 0.5, "stream": False},
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 1, "stop": ["x"]},
    "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 2},
    **{path: {"input": ["a", "b"], "use_activation": False} for path in CLASSIFY_PATHS},
    **{path: {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1} for path in RERANK_PATHS},
    **{path: {"text_1": "a", "text_2": ["b", "c"]} for path in SCORE_PATHS},
    "/tokenize": {"prompt": "hello", "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/apply-template": {"messages": MESSAGES},
}
STRUCTS: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    **dict.fromkeys(CLASSIFY_PATHS, ClassificationRequest),
    **dict.fromkeys(RERANK_PATHS, RerankRequest),
    **dict.fromkeys(SCORE_PATHS, ScoreRequest),
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/apply-template": ApplyTemplateRequest,
}
# The highest allowed value of a field, and the next one.
LIMITS: dict[str, tuple[int, ...]] = {
    "n": (128, 129), "best_of": (128, 129), "top_logprobs": (20, 21), "logprobs": (20, 21),
    "prompt_logprobs": (20, 21), "max_tokens": (2048, 2049), "min_tokens": (2048, 2049), "temperature": (2, 3),
    "max_completion_tokens": (2048, 2049), "truncate_prompt_tokens": (2048, 2049),
}  # fmt: skip
EDGES = (-1, 0, 1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, TOO_LARGE, True, "1", None, 0.5, -0.0)
ODD = (
    *EDGES, "", "\0", "a\0b", "\ud800", "é" * 2000, [], {}, [[]], [None], [True], {"a": None}, ["a"] * 3000,
    {str(i): i for i in range(2000)}, "<|im_start|>", "{{ 7 * 7 }}", "../../etc/passwd",
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
    [{"role": 7}], [{"role": "user"}], [{"content": "x"}], {"type": "json_object"}, 10**400, "9" * 5000,
)  # fmt: skip


def encoded(value: Any) -> bytes:
    return json.dumps(value).replace(f'"{TOO_LARGE}"', "1e309").encode()


def at_the_edges() -> Iterator[tuple[str, bytes]]:
    """Yield a path and a body for each field of each route with each value at the edge of what is allowed."""
    for path, struct in STRUCTS.items():
        for name in struct.__struct_fields__:
            for value in (*EDGES, *LIMITS.get(name, ())):
                yield path, encoded(VALID[path] | {name: value})


def drawn(random: Random) -> tuple[str, bytes]:
    """Return a path and a body that was drawn at random; most are invalid."""
    path = random.choice(list(VALID))
    body = deepcopy(VALID[path])
    for _ in range(random.randint(1, 3)):
        body = _bend(random, path, body)
    raw = encoded(body)
    for bend in random.choices([None, *_RAW], [8, *(1 for _ in _RAW)], k=1):
        if bend is not None:
            raw = bend(random, raw)
    return path, raw


def _bend(random: Random, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Remove a field, or change the value of a field or of a part of it; the field need not have been there."""
    name = random.choice([*body, *STRUCTS[path].__struct_fields__, *UNSUPPORTED, "unknown"])
    match random.randrange(6):
        case 0:
            body.pop(name, None)
        case 1 if isinstance(body.get(name), list) and body[name]:
            body[name][random.randrange(len(body[name]))] = _odd(random)
        case 2 if "messages" in body and isinstance(body["messages"], list) and body["messages"]:
            message = random.choice(body["messages"])
            if isinstance(message, dict):
                message[random.choice(["role", "content", "tool_calls", "name", "x"])] = _odd(random)
        case 3:
            body[name] = [_odd(random), _odd(random)]
        case 4:
            body[name] = {random.choice(["a", "type", "include_usage", ""]): _odd(random)}
        case _:
            body[name] = _odd(random)
    return body


def _odd(random: Random) -> Any:
    """Return a copy: a body must not hold a list twice, or hold itself."""
    return deepcopy(random.choice(ODD))


def _insert(raw: bytes, fields: bytes) -> bytes:
    """Put fields in front of the others."""
    return raw.replace(b"{", b"{" + fields + b", ", 1)


def _byte(random: Random, raw: bytes) -> bytes:
    at = random.randrange(len(raw))
    return raw[:at] + bytes([random.randrange(256)]) + raw[at + 1 :]


_RAW: tuple[Callable[[Random, bytes], bytes], ...] = (
    _byte,
    lambda random, raw: raw[: random.randrange(len(raw))],
    lambda random, raw: raw + random.choice([b"}", b"\0", raw, b" x", b"\xff"]),
    lambda random, raw: random.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\0"]) + raw,
    lambda random, raw: _insert(raw, random.choice([b'"\xff\xfe": 1', b'"a": "\xed\xa0\x80"', b'"a": "\\ud800"'])),
    lambda random, raw: _insert(raw, random.choice([b'"max_tokens": NaN', b'"n": Infinity', b'"n": -1e309'])),
    lambda random, raw: _insert(raw, b'"max_tokens": 1, "max_tokens": 1, "model": "x", "model": null'),
    lambda random, raw: _insert(raw, b'"temperature": ' + b"9" * random.choice([400, 20_000])),
    lambda random, raw: raw.decode().encode("utf-16"),
    lambda random, raw: random.choice([b"", b" ", b"null", b"[]", b"1", b'"a"', b"[" + raw + b"]"]),
)


def monsters() -> Iterator[tuple[str, bytes]]:
    """Yield paths and very large bodies: each kind for each route."""
    keys = b", ".join(b'"k%d": %d' % (number, number) for number in range(MANY_KEYS))
    nests = [(b"[", b"]"), (b'{"a":', b"}")]
    for path in VALID:
        valid = encoded(VALID[path])
        yield path, _insert(valid, keys)
        yield path, _insert(valid, b'"unknown": ' + b"9" * 1_000_000)
        for opening, closing in nests:
            yield path, opening * DEEP
            yield path, opening * DEEP + b"1" + closing * DEEP
            yield path, _insert(valid, b'"unknown": ' + opening * DEEP + b"1" + closing * DEEP)
            yield path, _insert(valid, b'"unknown": ' + opening * 60 + b"1" + closing * 60)
        yield path, _insert(valid, b'"unknown": [' + b"{}," * DEEP + b"{}]")
        yield path, _insert(valid, b'"unknown": "' + b"\\u0000" * DEEP + b'"')
        yield path, _insert(valid, b'"unknown": {' + b'"a": 1, ' * DEEP + b'"a": 1}')
