"""Requests for text as the core takes them from any dialect.

None always means that the client has left out a value. The core checks the values, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagewick.pooling_params import Classification, PoolingParams, Scoring
from pagewick.text.infill import Infill
from pagewick.text.pair_prompts import Pair
from pagewick.text.tool_calls.offer import ToolChoice

# Messages and tools have OpenAI's form, which chat templates read.
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Thinking:
    """is_wanted: whether the model is to think. effort: how much, in OpenAI's words.

    budget: upper limit of tokens of thought; -1: no limit.
    """

    is_wanted: bool | None = None
    effort: str | None = None
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class Template:
    """How a conversation becomes a prompt.

    source: a chat template of the client's own. variables: for that template or the model's.
    """

    source: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


@dataclass(frozen=True, slots=True)
class Serving:
    """How a request is served, in the words of RequestOptions.

    shares_prefix: whether the prompt may share its beginning with those of other requests. is_prefill: only the blocks
    of the prompt are wanted.
    """

    priority: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    timeout_s: float | None = None
    shares_prefix: bool = True
    is_prefill: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """The fields that requests for text have in common.

    sampling: fields of SamplingParams; others have the server's or the model's default. logit_bias may be pairs of a
    token id or a text, and a bias; False bans the token. default_max_tokens: the dialect's, if the server has none.
    names: from fields here and in SamplingParams to the names under which the client has sent them, where these differ;
    `[]` stands for any index.
    truncate_prompt_tokens: how many of the prompt's last tokens to keep; -1: as many as fit. lowers_max_tokens: go on
    until the context is full if max_tokens exceeds its room, instead of refusing the request.
    """

    is_stream: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    lowers_max_tokens: bool = False
    default_max_tokens: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    serving: Serving = Serving()
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(TextRequest):
    """A conversation that the model is to continue.

    tools: those that the model may call, in OpenAI's form. tool_choice: which of them it calls. splits_reasoning:
    separate thoughts from the text. records: keep the conversation under its session_id.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    template: Template = Template()
    thinking: Thinking = Thinking()
    splits_reasoning: bool = True
    records: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsRequest(TextRequest):
    """Texts, or token ids, that the model is to continue, texts to write between others, or pairs of texts to score.

    suffix: text that follows the wanted text. num_prompt_logprobs: field that asks for alternatives per prompt token ->
    their number. pooling: what embeddings, classes or scores of the prompts are wanted, in place of text.
    """

    prompts: Sequence[str | list[int] | Pair | Infill]
    suffix: str | None = None
    num_prompt_logprobs: Mapping[str, int] = field(default_factory=dict)
    pooling: PoolingParams | Classification | Scoring | None = None
