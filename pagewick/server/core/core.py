"""Core: turns a request for text, in any dialect, into Generations."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Unpack

from msgspec import structs

from pagewick.async_llm import AsyncEngine
from pagewick.engine.admission import check_writes_text
from pagewick.engine.messages import ImageInput
from pagewick.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from pagewick.generation import Generation, OnDelta
from pagewick.outputs import PartKind
from pagewick.pooling_params import Classification, PoolingParams, Scoring
from pagewick.server.core.conversations import ConversationStore, LocalConversations, Recording
from pagewick.server.core.field_names import renamed
from pagewick.server.core.limits import check_prompt_logprobs
from pagewick.server.core.request import ChatRequest, PromptsRequest, TextRequest
from pagewick.server.core.request_context import RequestContext, options_of
from pagewick.server.core.sampling import bias_texts, sampling_params
from pagewick.server.core.stored_responses import LocalResponses, ResponseStore
from pagewick.server.core.template import chat_options
from pagewick.server.core.thinking import ThinkingModel, budget_of
from pagewick.server.core.tool_rounds import ServerTools
from pagewick.server.settings import ServerSettings
from pagewick.server.telemetry.request_log import Observation, RequestLog
from pagewick.text.infill import Infill
from pagewick.text.output_stream import ChoiceDelta
from pagewick.text.pair_prompts import Pair
from pagewick.text.prompts import ChatEncodeOptions
from pagewick.text.request_maker import PlanFields, RequestPlan
from pagewick.text.tool_calls.checks import checked_offer
from pagewick.text.tool_calls.offer import ToolOffer

# The log's words for requests of prompts, by the type of what is pooled.
_ROUTES = {type(None): "completion", PoolingParams: "embedding", Classification: "classification", Scoring: "score"}


class Core:
    """The core of one server, which its dialects share.

    It checks the values of a request before anything is encoded. A dialect checks the shape of a body, and the engine
    everything that depends on the prompt's tokens. conversations, responses: None keeps those
    of this process. tools: those that the server runs itself.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        settings: ServerSettings,
        log: RequestLog,
        conversations: ConversationStore | None = None,
        responses: ResponseStore | None = None,
        tools: ServerTools | None = None,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.conversations = conversations or LocalConversations(engine.session_ttl_s)
        self.responses = responses or LocalResponses()
        self.tools = tools
        self._log = log
        self._takes_late_instructions: bool | None = None

    @property
    def thinking_model(self) -> ThinkingModel:
        return ThinkingModel.of(self.engine)

    async def recording(self, context: RequestContext, chat: ChatRequest) -> Recording | None:
        """Return a recording with all messages of the conversation, if it is to be kept. The caller must close it.

        If only the server's settings ask for recording, a request without a session is served without.
        Raises InvalidRequestError, or ApiError (409) while another request of the session runs.
        """
        session_id = chat.serving.session_id
        is_wanted = chat.records
        if is_wanted is None:
            is_wanted = self.settings.record_conversation and session_id is not None
        if not is_wanted:
            return None
        if not session_id:
            message = "record_conversation needs a session_id, which names the conversation"
            raise InvalidRequestError(message, param="session_id")
        if (chat.sampling.get("n") or 1) > 1:
            raise InvalidRequestError("a recorded conversation has one response per request; leave out n", param="n")
        messages = [dict(message) for message in chat.messages]
        is_continuation = chat.template.continue_final_message
        return await self.conversations.begin(context.key, session_id, messages, is_continuation=is_continuation)

    async def start_chat(self, context: RequestContext, chat: ChatRequest, recording: Recording | None) -> Generation:
        """Return a request that is ready to run.

        Raises InvalidRequestError and ContextLengthError, with the dialect's names for fields, UnsupportedError and
        EngineDeadError.
        """
        # Before a chat template is asked for, which such a model has no use for.
        check_writes_text(self.engine.info)
        with _naming_fields(chat.names):
            offer = self._offer(chat)
            plan = await self._plan(
                context,
                chat,
                split_reasoning=self.settings.reasoning_parser == "auto" and chat.splits_reasoning,
                thinking_budget=budget_of(chat.thinking, self.settings, self.thinking_model),
                split_parts=True,
                offer=offer,
            )
            messages = chat.messages if recording is None else recording.messages
            given = await self.engine.chat_input(
                messages, chat.tools if offer is not None else None, **self._encoding(chat, _room_for(plan))
            )
            token_ids, images = given
            if plan.params.prompt_logprobs is not None:
                check_prompt_logprobs("prompt_logprobs", 1, len(token_ids), plan.params.prompt_logprobs)
            is_logged = self.settings.log_prompts
            text = await asyncio.to_thread(self.engine.decode, given.short_token_ids) if is_logged else None
            on_delta = None if recording is None else recording.observe
            return self._generation(context, "chat", chat, plan, token_ids, text, on_delta, images)

    async def count_tokens(self, chat: ChatRequest) -> int:
        """Return the number of tokens of the prompt that `start_chat` would make. Raises as it does."""
        with _naming_fields(chat.names):
            tools = chat.tools if self._offer(chat) is not None else None
            return len(await self.engine.encode_chat(chat.messages, tools, **self._encoding(chat, 1)))

    async def takes_late_instructions(self) -> bool:
        """Return whether the model's chat template writes system messages that stand behind others.

        Many templates refuse them, and some leave them out.
        """
        if self._takes_late_instructions is None:
            roles = ("user", "system", "assistant", "user")
            messages = [{"role": role, "content": f"the words of the {role}"} for role in roles]
            try:
                prompt = await self.engine.render_chat(messages)
            except InvalidRequestError:
                prompt = ""
            self._takes_late_instructions = "the words of the system" in prompt
        return self._takes_late_instructions

    async def start_prompts(self, context: RequestContext, request: PromptsRequest) -> list[Generation]:
        """Return one Generation per prompt, all ready to run. Raises as `start_chat` does."""
        with _naming_fields(request.names):
            info, pooling = self.engine.info, request.pooling
            if isinstance(pooling, PoolingParams):
                pooling = pooling.checked(info.embedding_size, info.embedding)
            plan = await self._plan(context, request, pooling=pooling)
            route = _ROUTES[type(pooling)]
            generations = []
            for place, prompt in enumerate(request.prompts):
                with _naming_prompt(place, len(request.prompts)):
                    token_ids = await self._prompt_token_ids(prompt, request, plan)
                    text = prompt if isinstance(prompt, str) else None
                    if isinstance(prompt, Pair) and self.settings.log_prompts:
                        text = self.engine.decode(token_ids)
                    generations.append(self._generation(context, route, request, plan, token_ids, text))
            num_tokens = sum(len(one.output.prompt_token_ids) for one in generations)
            for name, num_logprobs in request.num_prompt_logprobs.items():
                check_prompt_logprobs(name, plan.params.n, num_tokens, num_logprobs)
            return generations

    def _offer(self, chat: ChatRequest) -> ToolOffer | None:
        if chat.tools and PartKind.TOOL_CALL not in self.engine.part_kinds:
            message = "tools cannot be used: how this model writes tool calls is not known; leave it out"
            raise UnsupportedError(message, param="tools")
        return checked_offer(chat.tools, chat.tool_choice)

    def _encoding(self, chat: ChatRequest, num_output_tokens: int) -> ChatEncodeOptions:
        return {
            "add_special_tokens": bool(chat.add_special_tokens),
            "truncate_prompt_tokens": chat.truncate_prompt_tokens,
            "num_output_tokens": num_output_tokens,
            **chat_options(chat.template, chat.thinking, self.settings),
        }

    async def _plan(self, context: RequestContext, request: TextRequest, **fields: Unpack[PlanFields]) -> RequestPlan:
        """Check all values of a request. Raises InvalidRequestError."""
        num_kept = request.truncate_prompt_tokens
        if num_kept is not None and num_kept != -1 and not 1 <= num_kept < 2**31:
            message = "truncate_prompt_tokens must be the number of tokens to keep, or -1 for as many as fit"
            raise InvalidRequestError(message, param="truncate_prompt_tokens")
        texts = bias_texts(request.sampling)
        spelled = {text: await self.engine.encode(text, add_special_tokens=False) for text in texts}
        params = sampling_params(request, self.engine.default_params, spelled, self.engine.chosen_defaults)
        options = options_of(request.serving)
        is_servers = self.engine.default_params.max_tokens is not None and "max_tokens" not in request.sampling
        # A limit of the server's is no reason to refuse a request.
        if is_servers or request.lowers_max_tokens:
            options = structs.replace(options, lowers_max_tokens=True)
        fields = PlanFields(**fields, adapter=context.adapter)
        plan = await self.engine.prepare(params, options=options, **fields)
        options = context.isolate(plan.options, request.serving, self.settings)
        grammar = plan.grammar
        if grammar is not None:
            # The engine may find that it cannot be honoured, after the request has started.
            grammar = replace(grammar, param=renamed(grammar.param, request.names))
        return replace(plan, options=options, grammar=grammar, keeps_logprobs=False)

    def _generation(
        self,
        context: RequestContext,
        route: str,
        request: TextRequest,
        plan: RequestPlan,
        token_ids: list[int],
        text: str | None,
        on_delta: OnDelta | None = None,
        images: Sequence[ImageInput] = (),
    ) -> Generation:
        """route: the log's word for it. text: the prompt's, if it is known. on_delta: gets each delta, too."""
        n, max_tokens = plan.params.n, plan.params.max_tokens
        seen = Observation(self._log, context.request_id, route, len(token_ids), request.is_stream, n, max_tokens, text)

        def observe(delta: ChoiceDelta) -> None:
            seen.on_delta(delta)
            if on_delta is not None:
                on_delta(delta)

        listen = seen.on_delta if on_delta is None else observe
        seen.generation = self.engine.generation(
            token_ids,
            plan,
            request_id=context.engine_id(),
            on_delta=listen,
            stream_interval=self.settings.stream_interval if request.is_stream else 1,
            images=images,
        )
        return seen.generation

    async def _prompt_token_ids(
        self, prompt: str | list[int] | Pair | Infill, request: PromptsRequest, plan: RequestPlan
    ) -> list[int]:
        if isinstance(prompt, Pair):
            return await self.engine.encode_pair(prompt, truncate_prompt_tokens=request.truncate_prompt_tokens)
        if isinstance(prompt, Infill):
            texts = prompt.prefix, prompt.suffix
            return await self.engine.encode_infill(*texts, others=prompt.others, beginning=prompt.beginning)
        if request.suffix:
            if not isinstance(prompt, str):
                raise InvalidRequestError("suffix needs a prompt that is a text", param="suffix")
            return await self.engine.encode_infill(prompt, request.suffix)
        num_kept = request.truncate_prompt_tokens
        if isinstance(prompt, str):
            return await self.engine.encode(
                prompt,
                add_special_tokens=request.add_special_tokens is not False,
                truncate_prompt_tokens=num_kept,
                num_output_tokens=_room_for(plan),
                keeps_beginning=plan.pooling is not None,
            )
        if num_kept == -1:
            num_kept = max(1, self.engine.info.max_model_len - _room_for(plan))
        if num_kept is None:
            return prompt
        return prompt[-num_kept:] if plan.pooling is None else prompt[:num_kept]


@contextmanager
def _naming_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Give errors about fields the client's names for them."""
    try:
        yield
    except InvalidRequestError as error:
        error.args = (renamed(str(error), names),)
        error.param = error.param and renamed(error.param, names)
        raise


@contextmanager
def _naming_prompt(place: int, num_prompts: int) -> Iterator[None]:
    """Let errors about one of several prompts say which one it is."""
    try:
        yield
    except InvalidRequestError as error:
        if num_prompts == 1 or not (isinstance(error, ContextLengthError) or error.param == "prompt"):
            raise
        kind = ContextLengthError if isinstance(error, ContextLengthError) else InvalidRequestError
        name = f"prompt[{place}]"
        raise kind(f"{name}: {error}", param=name) from None


def _room_for(plan: RequestPlan) -> int:
    """Return how many tokens stay free after a prompt that is cut to fit."""
    max_tokens = None if plan.options.lowers_max_tokens else plan.params.max_tokens
    return 1 if max_tokens is None else max_tokens
