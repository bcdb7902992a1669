"""RequestMaker: turns a checked plan and a prompt into the engine's request and the stream that reads its output."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

import msgspec

from pagewick.engine.messages import EngineRequest, ImageInput, RequestOptions
from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.outputs import PartKind
from pagewick.pooling_params import Classification, PoolingParams, Scoring
from pagewick.sampling_params import SamplingParams
from pagewick.text.grammars.checker import GrammarChecker
from pagewick.text.grammars.constraint import GrammarSpec
from pagewick.text.grammars.grammar import Grammar, grammar_of, whole_grammar
from pagewick.text.grammars.limits import GrammarLimits
from pagewick.text.grammars.vocabulary import special_tokens
from pagewick.text.part_splitter import JoinedSplitting, PartFormat, Splitting, joined
from pagewick.text.reasoning import Reasoning, ReasoningTags, Stage
from pagewick.text.request_stream import RequestStream, check_options, engine_request
from pagewick.text.thinking_budget import ThinkingBudget
from pagewick.text.token_strings import TokenStrings
from pagewick.text.tokenizer import Tokenizer
from pagewick.text.tool_calls.offer import ToolOffer

# Forms that could resemble calls: their rules may name any token.
_FORMS_WITHOUT_TOOLS = ("grammar", "structural_tag")


class PlanFields(TypedDict, total=False):
    """Fields of a RequestPlan that a caller may give besides params and options."""

    split_reasoning: bool
    thinking_budget: int | None
    split_parts: bool
    offer: ToolOffer | None
    keeps_logprobs: bool
    pooling: PoolingParams | Classification | Scoring | None
    adapter: str


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """A checked description of what to generate from a prompt. `RequestMaker.plan` makes it.

    split_reasoning: separate thoughts from text, if the model has reasoning tags. thinking_budget: upper limit of
    thinking tokens. split_parts: separate other parts, such as tool calls, from text, if the model's format for them is
    known. offer: the tools that the model may call. keeps_logprobs: see OutputStream. grammar: the texts that the
    response may be, after the thoughts if it is a chat's; `RequestMaker.plan` makes it from params.structured_outputs
    or from the offer. pooling: what embedding, classes or score of the prompt is wanted; params then ask for no token.
    adapter: name of the LoRA adapter; empty: none.
    """

    params: SamplingParams
    options: RequestOptions
    split_reasoning: bool = False
    thinking_budget: int | None = None
    split_parts: bool = False
    offer: ToolOffer | None = None
    keeps_logprobs: bool = True
    pooling: PoolingParams | Classification | Scoring | None = None
    adapter: str = ""
    grammar: Grammar | None = None

    @property
    def has_thoughts(self) -> bool:
        """Whether thoughts precede what the grammar allows. Outside a chat, their tags are text like any other."""
        return self.split_parts or self.split_reasoning


class RequestMaker:
    """Makes the requests for one model; may be used by several threads at once.

    tags, formats: the model's reasoning tags and part formats. vocab_size: the model's, which may differ from the
    tokenizer's. limits: of grammars. `close` ends the process that checks grammars.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tags: ReasoningTags | None,
        vocab_size: int,
        formats: Sequence[PartFormat] = (),
        *,
        limits: GrammarLimits | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        # A model without tokens for the tags, which only its tokenizer has, writes no thoughts.
        self._tags = tags if tags is not None and max(tags.start_ids + tags.end_ids) < vocab_size else None
        self._formats = formats
        self._strings = TokenStrings(tokenizer, vocab_size)
        self._budget = ThinkingBudget(tokenizer, self._tags, vocab_size)
        self._limits = limits or GrammarLimits()
        self._checker = GrammarChecker(special_tokens(tokenizer), vocab_size, self._limits.timeout_s)

    @property
    def kinds(self) -> frozenset[PartKind]:
        """The kinds of parts that can be separated from text."""
        reasoning = () if self._tags is None else (PartKind.REASONING,)
        return frozenset(reasoning).union(*(one.kinds for one in self._formats))

    def plan(
        self, params: SamplingParams, *, options: RequestOptions | None = None, **fields: Unpack[PlanFields]
    ) -> RequestPlan:
        """Check everything that does not depend on the prompt; nothing checks it again.

        Raises InvalidRequestError for a wrong option, for a thinking budget if the model has no reasoning tags or
        cannot write its closing tag, and for a form of the response that cannot be honoured.
        """
        plan = RequestPlan(params, options or RequestOptions(), **fields)
        form = params.structured_outputs
        answer = None if form is None else grammar_of(form, self._limits, self._spacing(plan.offer))
        if plan.offer is not None:
            if form is not None and form.form in _FORMS_WITHOUT_TOOLS:
                message = (
                    f"structured_outputs cannot be combined with tools if it has a {form.form}; leave one of them out"
                )
                raise InvalidRequestError(message, param="structured_outputs")
            offer = plan.offer
            if form is not None and not offer.is_required:
                offer = replace(offer, form="json" if form.is_json else "text")
            plan = replace(plan, offer=offer, grammar=self._grammar_of(offer, answer))
        elif answer is not None:
            plan = replace(plan, grammar=self._marked(answer) if plan.split_parts else answer)
        if plan.grammar is not None and params.use_beam_search:
            message = f"{plan.grammar.param} cannot be combined with use_beam_search; leave one of them out"
            raise InvalidRequestError(message, param=plan.grammar.param)
        check_options(plan.options)
        if plan.thinking_budget is not None:
            self._budget.check(plan.thinking_budget, params)
        return plan

    def prepare(self, plan: RequestPlan) -> None:
        """Do the slow work ahead, so that `make` is quick. Raises InvalidRequestError as `make` does."""
        self._strings.dry_breakers(plan.params)
        if plan.thinking_budget is not None:
            self._budget.prepare()
        for one in _grammars_of(plan):
            self._checker.check(whole_grammar(one, None), one.param, one.excluded)

    def has_checked(self, plan: RequestPlan) -> bool:
        """Whether the plan's grammars need no check any more, which may take long; True if it has none."""
        return all(self._checker.knows(whole_grammar(one, None), one.excluded) for one in _grammars_of(plan))

    def close(self) -> None:
        """End the process that checks grammars."""
        self._checker.close()

    def make(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        plan: RequestPlan,
        *,
        seed: int,
        prompt: str | None = None,
        images: Sequence[ImageInput] = (),
    ) -> tuple[EngineRequest, RequestStream]:
        """Make the engine's request, not yet checked against the engine's limits, and the stream of its response.

        images: what the placeholders among the prompt's tokens stand for, in order.
        Raises InvalidRequestError for a string that is not valid Unicode.
        """
        self.prepare(plan)
        reasoning = None
        wants = (plan.grammar, plan.offer, plan.thinking_budget)
        if self._tags is not None and (plan.split_reasoning or any(one is not None for one in wants)):
            reasoning = Reasoning.after(prompt_token_ids, self._tags, self._tokenizer)
        request = engine_request(
            request_id,
            prompt_token_ids,
            plan.params,
            seed=seed,
            options=plan.options,
            strings=self._strings,
            constraint=self._constraint(plan, reasoning),
            opening_ids=self._opening_ids if _may_open(plan, reasoning) else (),
            pooling=(plan.pooling and plan.pooling.pooling) or "",
            scoring=plan.pooling if isinstance(plan.pooling, Scoring) else None,
            images=images,
            adapter=plan.adapter,
        )
        splitting = self._splitting(prompt_token_ids, plan, reasoning)
        stream = RequestStream(
            self._tokenizer, request, plan.params, prompt, splitting, keeps_logprobs=plan.keeps_logprobs
        )
        return request, stream

    def _splitting(
        self, prompt_token_ids: Sequence[int], plan: RequestPlan, reasoning: Reasoning | None
    ) -> Splitting | None:
        """Return how the responses are split into thoughts, text and other parts."""
        is_guided = plan.grammar is not None
        splittings: list[Splitting] = []
        for one in self._formats if plan.split_parts else ():
            if (found := one.splitting(prompt_token_ids, plan.offer, is_guided=is_guided)) is not None:
                splittings.append(found)
        # Thoughts come first, because a tool call inside a thought is not a tool call.
        if reasoning is not None and plan.split_reasoning:
            return joined([reasoning, *splittings])
        behind = joined(splittings)
        if reasoning is None or plan.offer is None or behind is None:
            return behind
        return JoinedSplitting(reasoning, behind)

    def _grammar_of(self, offer: ToolOffer, answer: Grammar | None) -> Grammar | None:
        """Return the grammar of responses with calls. answer: the grammar of those without, if they have a form.

        Raises UnsupportedError for a required call, or a form, without a grammar.
        """
        for one in self._formats:
            if PartKind.TOOL_CALL in one.kinds and (lark := one.grammar(offer, self._limits)) is not None:
                if answer is None or not offer.has_form:
                    return Grammar(lark, param="tools")
                return Grammar(lark, param="tools", answer=replace(answer, excluded=tuple(one.beginnings(offer))))
        if offer.is_required:
            message = "tool_choice must be auto or none: no grammar is known that could force this model's calls"
            raise UnsupportedError(message, param="tool_choice")
        if offer.has_form:
            message = "structured_outputs cannot be combined with tools: no grammar of this model's calls is known"
            raise UnsupportedError(message, param="structured_outputs")
        return None

    def _spacing(self, offer: ToolOffer | None) -> Mapping[str, Any] | None:
        """Return how JSON must be spaced so that calls differ from it; None if that does not matter."""
        if offer is None or offer.is_required:
            return None
        return next(filter(None, (one.json_spacing for one in self._formats)), None)

    def _marked(self, answer: Grammar) -> Grammar:
        """Return the grammar of a chat's responses without tools that have a form."""
        for one in self._formats:
            if (lark := one.form_grammar(self._limits)) is not None:
                return Grammar(lark, param=answer.param, answer=answer)
        return answer

    @functools.cached_property
    def _opening_ids(self) -> tuple[int, ...]:
        """The tokens that a thought may begin with: that of its tag, and a line break before it."""
        if self._tags is None:
            return ()
        return (self._tags.start_ids[0], *self._tokenizer.encode_pieces(["", "\n"]))

    def _constraint(self, plan: RequestPlan, reasoning: Reasoning | None) -> Any:
        """Return EngineRequest.constraint: the parts that apply together, the only one, or None."""
        parts: list[dict[str, Any]] = []
        if plan.thinking_budget is not None and reasoning is not None:
            budget = self._budget.constraint(plan.thinking_budget, reasoning)
            parts += [] if budget is None else [budget]
        if plan.grammar is not None:
            spec = GrammarSpec(
                grammar=whole_grammar(plan.grammar, reasoning if plan.has_thoughts else None),
                ignores_eos=plan.params.ignore_eos,
                stop_token_ids=list(plan.params.stop_token_ids),
                param=plan.grammar.param,
            )
            parts.append(msgspec.to_builtins(spec))
        return parts if len(parts) > 1 else next(iter(parts), None)


def _grammars_of(plan: RequestPlan) -> Iterable[Grammar]:
    return () if plan.grammar is None else filter(None, (plan.grammar.answer, plan.grammar))


def _may_open(plan: RequestPlan, reasoning: Reasoning | None) -> bool:
    """Whether the grammar allows a thought that has not begun yet."""
    is_awaited = reasoning is not None and reasoning.stage == Stage.AWAITED
    return plan.grammar is not None and plan.has_thoughts and is_awaited
