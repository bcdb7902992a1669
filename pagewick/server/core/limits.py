"""Limits on what one request may ask for, which are checked before anything is done with it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from pagewick.errors import InvalidRequestError

MAX_JSON_DEPTH = 64
MAX_JSON_PARTS = 250_000
MAX_MESSAGES = 2048
MAX_SEQUENCES = 1024  # prompts times choices of one request
MAX_INPUTS = 2048  # of one request for embeddings, as in OpenAI's API
MAX_STOP_CHARS = 1024
# Entries for prompts: choices * tokens * (1 + logprobs). A response has some 30 to 60 bytes for each.
MAX_PROMPT_LOGPROBS = 2**20
# Number of requests whose texts wait for their turn or are being read.
MAX_TEXT_JOBS = 1024
# Limit for /detokenize, as a multiple of the model's context.
MAX_CONTEXTS = 4

_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def check_nesting(body: bytes) -> None:
    """Raises InvalidRequestError for JSON that is deep or long enough to make parsing it an attack."""
    has_few_strings = body.count(b'"') <= 2 * MAX_JSON_PARTS
    if body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH and has_few_strings:
        return
    # Python code runs only once per bracket, since a body may be one string of many megabytes.
    if b"\\" in body:
        # Pairs of backslashes go first; one that is left then escapes the character after it.
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_strings = (body.count(b'"') + 1) // 2
    # Every other piece lies between two strings; their brackets do not count.
    brackets = b"".join(body.split(b'"', 2 * MAX_JSON_PARTS)[::2]).translate(None, _NO_BRACKETS)
    if max(accumulate(map(_STEPS.__getitem__, brackets[:MAX_JSON_PARTS])), default=0) > MAX_JSON_DEPTH:
        raise InvalidRequestError(f"the JSON is nested deeper than {MAX_JSON_DEPTH} levels")
    if num_strings + len(brackets) > MAX_JSON_PARTS:
        raise InvalidRequestError(f"the JSON has more than {MAX_JSON_PARTS} strings and brackets")


def check_count(param: str, count: int, limit: int) -> None:
    """Raises InvalidRequestError unless 1 <= count <= limit."""
    if not 1 <= count <= limit:
        raise InvalidRequestError(f"{param} must have 1 to {limit} entries; got {count}", param=param)


def check_choices(num_prompts: int, n: int) -> None:
    """n: choices of each prompt. Raises InvalidRequestError for too many choices in all."""
    if (count := num_prompts * n) > MAX_SEQUENCES:
        message = (
            f"a request may have at most {MAX_SEQUENCES} choices, n (or best_of) * prompts; these are {n} * "
            f"{num_prompts} = {count}. Lower n, or send fewer prompts at once"
        )
        raise InvalidRequestError(message, param="prompt")


def check_prompt_logprobs(param: str, num_choices: int, num_tokens: int, num_logprobs: int) -> None:
    """num_tokens: in all prompts. Raises InvalidRequestError if the response would be too long with them."""
    num_entries = num_choices * num_tokens * (1 + num_logprobs)
    if num_entries > MAX_PROMPT_LOGPROBS:
        message = (
            f"log-probabilities of prompts may have at most {MAX_PROMPT_LOGPROBS} entries, n * prompt tokens * (1 + "
            f"{param}); these are {num_choices} * {num_tokens} * {1 + num_logprobs} = {num_entries}. Lower n or "
            f"{param}, or send less at once"
        )
        raise InvalidRequestError(message, param=param)


def check_stop(stop: Iterable[str]) -> None:
    """Raises InvalidRequestError for a stop string that is too long; SamplingParams checks the rest."""
    if any(len(text) > MAX_STOP_CHARS for text in stop):
        raise InvalidRequestError(f"a stop string must have at most {MAX_STOP_CHARS} characters", param="stop")
