"""SamplingParams: the sampling parameters of a request, validated on construction."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from pagewick.errors import InvalidRequestError, ModelLoadError
from pagewick.foreign_names import accepts_vllm_names
from pagewick.sampling_values import TOKEN_LIMIT, biases, check_words, integer, number, shown, token_ids, tuple_of
from pagewick.structured_outputs import StructuredOutputsParams

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_BEAMS = 32
MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 64
# Larger than any vocabulary. The engine checks against the model's vocabulary.
MAX_ALLOWED_TOKENS = 2**20
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 64
MAX_BREAKERS = 64
MAX_WORD_BYTES = 128
SEED_LIMIT = 2**63
_NUMBERS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "top_n_sigma": (0.0, 100.0),
    "repetition_penalty": (0.01, 10.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "dry_multiplier": (0.0, 100.0),
    "dry_base": (1.0, 100.0),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "mirostat_tau": (0.0, 100.0),
    "mirostat_eta": (0.0, 10.0),
    "length_penalty": (-10.0, 10.0),
}
_POSITIVE = ("top_p", "typical_p")
_INTEGERS = {
    "n": (1, MAX_CHOICES),
    "top_k": (-1, TOKEN_LIMIT),
    "min_tokens": (0, TOKEN_LIMIT),
    "repeat_last_n": (-1, TOKEN_LIMIT),
    "dry_allowed_length": (1, TOKEN_LIMIT),
    "dry_penalty_last_n": (-1, TOKEN_LIMIT),
    "mirostat": (0, 2),
}
_OPTIONAL_INTEGERS = {
    "max_tokens": (0, TOKEN_LIMIT),
    "seed": (-SEED_LIMIT, SEED_LIMIT - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "best_of": (1, MAX_CHOICES),
}
# The smallest and the largest value of each field that is a number. A top_n_sigma of -1 means 0.
RANGES: Mapping[str, tuple[float, float]] = {**_NUMBERS, **_INTEGERS, **_OPTIONAL_INTEGERS, "top_n_sigma": (-1.0, 100)}
_BOOLEANS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "use_beam_search", "early_stopping")

_TRUNCATIONS = ("top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier")
_NOT_WITH_BEAMS = (*_TRUNCATIONS, "mirostat", *_PENALTIES, "seed", "best_of", "stop", "structured_outputs")
_ONLY_WITH_BEAMS = ("length_penalty", "early_stopping")


@accepts_vllm_names
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters for sampling and for the end of generation, named as in vLLM, or llama.cpp where vLLM has none.

    docs/sampling.md has the exact definitions, and the order in which the sampler applies them.

    n: choices per prompt, each an independent sample; with use_beam_search the number of beams.
    max_tokens: upper limit of new tokens; None: until the context is full. 0: compute only the prompt, for its
        log-probabilities or for the prefix cache.
    temperature: divides the logits; 0: take the most likely token, regardless of truncation.
    top_k: keep the k most likely tokens; 0 or -1 keeps all.
    top_p: keep the smallest set of most likely tokens whose mass reaches top_p.
    seed: makes the sample repeatable, independently of the batch; None: a random seed.
    stop: strings that end the text and are removed from it. include_stop_str_in_output: keep the stop string.
    stop_token_ids: tokens that end the output. Duplicates are dropped, as in allowed_token_ids.
    ignore_eos: continue after the model's end-of-sequence token.
    min_tokens: number of tokens before which no end-of-sequence or stop token is sampled.
    logprobs: report the log-probability of each output token and of this number of alternatives.
    prompt_logprobs: the same for the prompt's tokens.
    skip_special_tokens: omit special tokens from the text.
    min_p: drop tokens less likely than min_p times the most likely one.
    typical_p: keep the smallest set of most typical tokens whose mass reaches typical_p.
    repetition_penalty: divides positive and multiplies negative logits of tokens seen; above 1 discourages them.
    repeat_last_n: number of last tokens of prompt and output for repetition_penalty; -1: all, 0: none.
    presence_penalty: subtracted from the logits of tokens that occur in the output.
    frequency_penalty: subtracted from these logits once per occurrence.
    logit_bias: token id -> value added to its logit. Keys may be strings of digits, as in JSON.
    top_n_sigma: keep logits within this number of standard deviations of the largest; 0 or -1: off.
    dry_multiplier: strength of the penalty on tokens that continue a repetition; 0: off. The penalty is
        dry_multiplier * dry_base ** (length - dry_allowed_length), for repetitions of at least dry_allowed_length.
    dry_penalty_last_n: number of last tokens searched for repetitions; -1: all, 0: none.
    dry_sequence_breakers: strings at which a repetition ends.
    xtc_probability: probability of dropping all tokens of at least xtc_threshold except the least likely of them.
    mirostat: 1 or 2: truncate such that the surprise per token stays near mirostat_tau bits. mirostat_eta: learning
        rate.
    bad_words: strings that are not generated.
    allowed_token_ids: generate only these tokens; None: all.
    best_of: generate this number of choices, at least n, and return the n most likely.
    use_beam_search: return the n most likely continuations that a search of width n finds. length_penalty: a beam's
        score is its log-probability / length ** length_penalty. early_stopping: end as soon as n beams are complete.
    structured_outputs: the form that the response must have, as an object or a mapping of its fields.

    Raises InvalidRequestError if a value is out of range or conflicts with another.
    """

    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    repeat_last_n: int = -1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    top_n_sigma: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._put_in_form()
        for name, (low, high) in _NUMBERS.items():
            value = getattr(self, name)
            if (plain := number(name, value, low, high, is_positive=name in _POSITIVE)) is not value:
                object.__setattr__(self, name, plain)
        for name, (first, last) in _INTEGERS.items():
            value = getattr(self, name)
            if (plain := integer(name, value, first, last)) is not value:
                object.__setattr__(self, name, plain)
        for name, (first, last) in _OPTIONAL_INTEGERS.items():
            value = getattr(self, name)
            if value is not None and (plain := integer(name, value, first, last)) is not value:
                object.__setattr__(self, name, plain)
        for name in _BOOLEANS:
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false; got {shown(value)}", param=name)
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        self._check_lists()
        self._check_combinations()

    @property
    def needs_history(self) -> bool:
        """Whether sampling depends on earlier tokens."""
        return bool(self.bad_words or self.has_penalty)

    @property
    def has_penalty(self) -> bool:
        """Whether earlier tokens are penalised, by DRY or otherwise."""
        return bool(
            self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty or self.dry_multiplier
        )

    def _put_in_form(self) -> None:
        """Convert lists to tuples, keys of logit_bias to integers, and other values for "off" to the default."""
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple_of("stop", self.stop))
        for name in ("stop_token_ids", "dry_sequence_breakers", "bad_words"):
            object.__setattr__(self, name, tuple_of(name, getattr(self, name)))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple_of("allowed_token_ids", self.allowed_token_ids))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", biases("logit_bias", self.logit_bias, MAX_LOGIT_BIASES))
        object.__setattr__(self, "structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        if self.top_n_sigma == -1:
            object.__setattr__(self, "top_n_sigma", 0.0)

    def _check_lists(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS or not all(isinstance(text, str) and text for text in self.stop):
            raise InvalidRequestError(
                f"stop must be at most {MAX_STOP_STRINGS} strings, none of them empty", param="stop"
            )
        check_words("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_WORD_BYTES)
        check_words("dry_sequence_breakers", self.dry_sequence_breakers, MAX_BREAKERS, MAX_WORD_BYTES)
        stop_token_ids = token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        if self.allowed_token_ids is not None:
            allowed = token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKENS)
            if not allowed:
                raise InvalidRequestError(
                    "allowed_token_ids must not be empty; leave it out to allow all tokens",
                    param="allowed_token_ids",
                )
            object.__setattr__(self, "allowed_token_ids", allowed)

    def _check_combinations(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = f"min_tokens ({self.min_tokens}) must not be above max_tokens ({self.max_tokens})"
            raise InvalidRequestError(message, param="min_tokens")
        if self.use_beam_search:
            self._check_beam_search()
            return
        for name in _ONLY_WITH_BEAMS:
            if self._is_set(name):
                raise InvalidRequestError(f"{name} needs use_beam_search; leave it out", param=name)
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequestError(f"best_of ({self.best_of}) must not be below n ({self.n})", param="best_of")
        if self.mirostat:
            for name in filter(self._is_set, _TRUNCATIONS):
                raise InvalidRequestError(
                    f"mirostat chooses the number of tokens by itself; leave out {name}", param=name
                )

    def _check_beam_search(self) -> None:
        if self.n > MAX_BEAMS:
            raise InvalidRequestError(f"n is the number of beams here, at most {MAX_BEAMS}; got {self.n}", param="n")
        if self.temperature not in (0, 1):
            raise InvalidRequestError(
                f"temperature has no effect with use_beam_search, which does not sample; leave it out "
                f"(0 and 1 are accepted); got {self.temperature!r}",
                param="temperature",
            )
        if self.max_tokens == 0:
            raise InvalidRequestError(
                "use_beam_search needs max_tokens of at least 1; to compute the prompt only leave use_beam_search out",
                param="max_tokens",
            )
        for name in filter(self._is_set, _NOT_WITH_BEAMS):
            raise InvalidRequestError(f"{name} cannot be combined with use_beam_search; leave it out", param=name)

    def _is_set(self, name: str) -> bool:
        return bool(getattr(self, name) != _DEFAULTS[name])


_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}


def default_sampling_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Read the sampling parameters in generation_config.json. Raises ModelLoadError for wrong values.

    With `"do_sample": false` the temperature is 0, even if the file has another, as in transformers.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: generation_config[name] for name in names if generation_config.get(name) is not None}
    if generation_config.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        return SamplingParams(**given)
    except InvalidRequestError as error:
        raise ModelLoadError(f"the model's generation_config.json is wrong: {error}\n  correct or remove it") from error


def with_changes(
    defaults: SamplingParams, changes: Mapping[str, Any], kept: Collection[str] = frozenset()
) -> SamplingParams:
    """Apply a user's values to a model's defaults.

    If the user requests mirostat or beam search, conflicting defaults are dropped, but never a value of the user. So is
    a temperature of 0 if the user requests a way of sampling, unless it is among `kept`, the defaults that the
    operator chose. Raises InvalidRequestError as SamplingParams does.
    """
    dropped: tuple[str, ...] = ()
    if changes.get("use_beam_search", defaults.use_beam_search):
        dropped = ("temperature", *_NOT_WITH_BEAMS)
    elif changes.get("mirostat", defaults.mirostat):
        dropped = _TRUNCATIONS
    is_sampled = any(changes.get(name, _DEFAULTS[name]) != _DEFAULTS[name] for name in ("mirostat", *_TRUNCATIONS))
    if is_sampled and defaults.temperature == 0 and "temperature" not in kept:
        dropped += ("temperature",)
    return replace(defaults, **{**{name: _DEFAULTS[name] for name in dropped}, **changes})
