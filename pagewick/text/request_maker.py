"""RequestMaker: turns a checked plan and a prompt into the engine's request and the stream that reads its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from pagewick.engine.messages import EngineRequest, RequestOptions
from pagewick.outputs import PartKind
from pagewick.sampling_params import SamplingParams
from pagewick.text.part_splitter import PartFormat, Splitting, joined
from pagewick.text.reasoning import Reasoning, ReasoningTags
from pagewick.text.request_stream import RequestStream, check_options, engine_request
from pagewick.text.thinking_budget import ThinkingBudget
from pagewick.text.token_strings import TokenStrings
from pagewick.text.tokenizer import Tokenizer


class PlanFields(TypedDict, total=False):
    """Fields of a RequestPlan besides params and options."""

    split_reasoning: bool
    thinking_budget: int | None
    split_parts: bool
    tools: Sequence[Mapping[str, Any]]
    keeps_logprobs: bool


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """A checked description of what to generate from a prompt. `RequestMaker.plan` makes it.

    split_reasoning: separate thoughts from text, if the model has reasoning tags. thinking_budget: upper limit of
    thinking tokens. split_parts: separate other parts, such as tool calls, from text, if the model's format for them is
    known. tools: the tools offered to the model. keeps_logprobs: see OutputStream.
    """

    params: SamplingParams
    options: RequestOptions
    split_reasoning: bool = False
    thinking_budget: int | None = None
    split_parts: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    keeps_logprobs: bool = True


class RequestMaker:
    """Makes the requests for one model; may be used by several threads at once.

    tags, formats: the model's reasoning tags and part formats. vocab_size: the model's, which may differ from the
    tokenizer's.
    """

    def __init__(
        self, tokenizer: Tokenizer, tags: ReasoningTags | None, vocab_size: int, formats: Sequence[PartFormat] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._tags = tags
        self._formats = formats
        self._strings = TokenStrings(tokenizer, vocab_size)
        self._budget = ThinkingBudget(tokenizer, tags, vocab_size)

    @property
    def kinds(self) -> frozenset[PartKind]:
        """The kinds of parts that can be separated from text."""
        reasoning = () if self._tags is None else (PartKind.REASONING,)
        return frozenset(reasoning).union(*(one.kinds for one in self._formats))

    def plan(
        self, params: SamplingParams, *, options: RequestOptions | None = None, **fields: Unpack[PlanFields]
    ) -> RequestPlan:
        """Check everything that does not depend on the prompt; nothing checks it again.

        Raises InvalidRequestError for a wrong option, or for a thinking budget if the model has no reasoning tags or
        cannot write its closing tag.
        """
        plan = RequestPlan(params, options or RequestOptions(), **fields)
        check_options(plan.options)
        if plan.thinking_budget is not None:
            self._budget.check(plan.thinking_budget, params)
        return plan

    def prepare(self, plan: RequestPlan) -> None:
        """Do the slow lookups ahead, so that `make` is quick. Raises InvalidRequestError as `make` does."""
        self._strings.dry_breakers(plan.params)
        if plan.thinking_budget is not None:
            self._budget.prepare()

    def make(
        self, request_id: str, prompt_token_ids: list[int], plan: RequestPlan, *, seed: int, prompt: str | None = None
    ) -> tuple[EngineRequest, RequestStream]:
        """Make the engine's request, not yet checked against the engine's limits, and the stream of its response.

        Raises InvalidRequestError for a string that is not valid Unicode.
        """
        reasoning = constraint = None
        if self._tags is not None and (plan.split_reasoning or plan.thinking_budget is not None):
            reasoning = Reasoning.after(prompt_token_ids, self._tags, self._tokenizer)
            if plan.thinking_budget is not None:
                constraint = self._budget.constraint(plan.thinking_budget, reasoning)
        request = engine_request(
            request_id,
            prompt_token_ids,
            plan.params,
            seed=seed,
            options=plan.options,
            strings=self._strings,
            constraint=constraint,
        )
        # Thoughts come first, because a tool call inside a thought is not a tool call.
        splittings: list[Splitting] = [reasoning] if reasoning is not None and plan.split_reasoning else []
        for one in self._formats if plan.split_parts else ():
            if (splitting := one.splitting(prompt_token_ids, plan.tools)) is not None:
                splittings.append(splitting)
        stream = RequestStream(
            self._tokenizer, request, plan.params, prompt, joined(splittings), keeps_logprobs=plan.keeps_logprobs
        )
        return request, stream
