"""RequestMaker: what was asked for to what the engine is asked, and the stream that reads its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from pagewick.engine.messages import EngineRequest, RequestOptions
from pagewick.outputs import PartKind
from pagewick.sampling_params import SamplingParams
from pagewick.text.part_formats import PartFormat, joined
from pagewick.text.part_splitter import Splitting
from pagewick.text.reasoning import Reasoning, ReasoningTags
from pagewick.text.request_stream import RequestStream, check_options, engine_request
from pagewick.text.thinking_budget import ThinkingBudget
from pagewick.text.token_strings import TokenStrings
from pagewick.text.tokenizer import Tokenizer


class PlanFields(TypedDict, total=False):
    """What a RequestPlan says beside params and options."""

    split_reasoning: bool
    thinking_budget: int | None
    split_parts: bool
    tools: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """What is wanted of a prompt. `RequestMaker.plan` makes it, and has then checked it.

    split_reasoning: tell thoughts from text, if the model has tags for them. thinking_budget: most tokens of thought.
    split_parts: tell other parts from text, as far as the model's formats are known. tools: those that it is offered.
    """

    params: SamplingParams
    options: RequestOptions
    split_reasoning: bool = False
    thinking_budget: int | None = None
    split_parts: bool = False
    tools: Sequence[Mapping[str, Any]] = ()


class RequestMaker:
    """For one model, whose reasoning tags and part formats these are; may be used by several threads at once.

    vocab_size: the model's, which may be another than the tokenizer's.
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
        """The kinds of parts that can be told from text."""
        reasoning = () if self._tags is None else (PartKind.REASONING,)
        return frozenset(reasoning).union(*(one.kinds for one in self._formats))

    def plan(
        self, params: SamplingParams, *, options: RequestOptions | None = None, **fields: Unpack[PlanFields]
    ) -> RequestPlan:
        """What is wanted, checked as far as it does not depend on the prompt: nothing checks it again.

        Raises InvalidRequestError for a wrong option, or a budget for a model that has no tags or cannot write its
        closing tag.
        """
        plan = RequestPlan(params, options or RequestOptions(), **fields)
        check_options(plan.options)
        if plan.thinking_budget is not None:
            self._budget.check(plan.thinking_budget, params)
        return plan

    def prepare(self, plan: RequestPlan) -> None:
        """Look up what takes a while the first time, so that `make` is quick. Raises InvalidRequestError as it does."""
        self._strings.dry_breaker_ids(plan.params)
        if plan.thinking_budget is not None:
            self._budget.prepare()

    def make(
        self, request_id: str, prompt_token_ids: list[int], plan: RequestPlan, *, seed: int, prompt: str | None = None
    ) -> tuple[EngineRequest, RequestStream]:
        """The engine's request, not yet checked against its limits, and the stream of its answer.

        Raises InvalidRequestError for a string that is no text.
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
        splitting = self._splitting(prompt_token_ids, plan, reasoning)
        return request, RequestStream(self._tokenizer, request, plan.params, prompt, splitting)

    def _splitting(
        self, prompt_token_ids: Sequence[int], plan: RequestPlan, reasoning: Reasoning | None
    ) -> Splitting | None:
        """Thoughts are read first: what a model writes in them is no tool call."""
        splittings: list[Splitting] = [reasoning] if reasoning is not None and plan.split_reasoning else []
        for one in self._formats if plan.split_parts else ():
            if (splitting := one.splitting(prompt_token_ids, plan.tools)) is not None:
                splittings.append(splitting)
        return joined(splittings)
