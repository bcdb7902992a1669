"""Requests for text as the core takes them: what a dialect has read, under names of no dialect.

None always stands for what the client has left out. The values are not checked yet: the core does that, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# As OpenAI writes them, which is what chat templates read; so are tools.
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Thinking:
    """is_wanted: whether the model is to think. effort: how much, in OpenAI's words.

    budget: most tokens of thought; -1: no limit.
    """

    is_wanted: bool | None = None
    effort: str | None = None
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class Template:
    """How a conversation becomes a prompt.

    source: of a chat template of the client's own. variables: for the template, whosever it is.
    """

    source: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


@dataclass(frozen=True, slots=True)
class Serving:
    """How a request is served, in the words of RequestOptions.

    shares_prefix: whether the prompt may share its beginning with those of other requests.
    """

    priority: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    timeout_s: float | None = None
    shares_prefix: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """What a request for text says in any dialect.

    sampling: fields of SamplingParams; what is left out has the model's default. logit_bias may be pairs of a token id
    or a text, and a bias, of which False bans.
    names: of fields here, and in SamplingParams -> what the dialect calls them, where that is something else.
    truncate_prompt_tokens: keep the prompt's last so many; -1: as many as fit.
    """

    is_stream: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    serving: Serving = Serving()
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(TextRequest):
    """A conversation that the model is to continue.

    response_format: what the answer must look like, as OpenAI says it. splits_reasoning: tell thoughts from the answer.
    records: keep the conversation, under its session_id.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    response_format: Mapping[str, Any] | None = None
    template: Template = Template()
    thinking: Thinking = Thinking()
    splits_reasoning: bool = True
    records: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsRequest(TextRequest):
    """Texts, or token ids, that the model is to continue.

    suffix: what comes behind the text that is asked for. num_prompt_logprobs: how many alternatives per prompt token
    the answer is to show, with the name of the field that says so; one entry per such field.
    """

    prompts: Sequence[str | list[int]]
    suffix: str | None = None
    num_prompt_logprobs: Mapping[str, int] = field(default_factory=dict)
