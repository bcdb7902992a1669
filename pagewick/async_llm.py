"""AsyncEngine: text in, text out, for many users at once. The model runs in another process.

    engine = await AsyncEngine.start(EngineConfig(model="Qwen/Qwen3-0.6B"))
    async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)
    await engine.close()

Imports no torch.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack

from pagewick import api_arguments
from pagewick.api_arguments import Model, check_sampling_params, engine_config, load_text
from pagewick.async_pooled_calls import AsyncPooledCalls
from pagewick.config import EngineConfig
from pagewick.engine.admission import check_request, check_writes_text
from pagewick.engine.health import EngineHealth
from pagewick.engine.messages import EngineStats, ImageInput, RequestOptions
from pagewick.engine.model_info import ModelInfo
from pagewick.engine.preflight import check_models
from pagewick.engine.supervisor import DEFAULT_HANG_TIMEOUT_S, AtEachStart, Supervisor
from pagewick.errors import ArgumentError, EngineDeadError, InvalidRequestError
from pagewick.generation import Client, Generation, OnDelta
from pagewick.local_models import local_adapter, with_local_models
from pagewick.lora_request import LoRARequest
from pagewick.outputs import PartKind, RequestOutput
from pagewick.sampling_params import SamplingParams
from pagewick.text.chat_template import ChatTemplate
from pagewick.text.content_parts import Message
from pagewick.text.grammars.limits import GrammarLimits
from pagewick.text.image_prompts import ImageReader
from pagewick.text.pair_prompts import PairPrompts
from pagewick.text.part_splitter import PartFormat
from pagewick.text.prompts import PromptEncoder
from pagewick.text.request_maker import PlanFields, RequestMaker, RequestPlan
from pagewick.text.tokenizer import Tokenizer
from pagewick.text.tool_calls.formats import format_named

SEED_BITS = 63

Text = tuple[Tokenizer, ChatTemplate | None, SamplingParams, PairPrompts | None]


async def start_engine(config: EngineConfig, *, hang_timeout_s: float, tool_call_parser: str | None) -> Supervisor:
    """Start an engine process for local models, and wait until it is ready. Arguments and errors: AsyncEngine.start."""
    if tool_call_parser is not None:
        format_named(tool_call_parser)
    await asyncio.to_thread(check_models, config)
    return await Supervisor.start(config, hang_timeout_s=hang_timeout_s)


class AsyncEngine(AsyncPooledCalls):
    """An engine process with its tokenizer and chat template. Created by `start`."""

    def __new__(cls, *args: object, **named: object) -> Self:
        """Raises ArgumentError for the arguments of `start`, or none: __init__ cannot wait for a process."""
        if len(args) < 2 and "client" not in named:
            raise ArgumentError("AsyncEngine is started by `engine = await AsyncEngine.start(model)`")
        return super().__new__(cls)

    def __init__(
        self,
        client: Client,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        *,
        default_params: SamplingParams | None = None,
        seed: int | None = None,
        session_ttl_s: float = EngineConfig().session_ttl,
        part_formats: Sequence[PartFormat] | None = None,
        tool_call_parser: str | None = None,
        grammar_limits: GrammarLimits | None = None,
        images: ImageReader | None = None,
        hub: str = EngineConfig().hub,
        pairs: PairPrompts | None = None,
    ) -> None:
        """part_formats: formats of tool calls and the like; None: the model's. tool_call_parser: see `start`.

        images: None for a model that reads no images. hub: where adapters are downloaded from. pairs: None for one that
        is no reranker.
        """
        prompts = PromptEncoder(
            tokenizer,
            chat_template,
            max_model_len=lambda: client.info.max_model_len,
            tool_call_parser=tool_call_parser,
            images=images,
        )
        super().__init__(prompts, pairs)
        self._client = client
        self.session_ttl_s = session_ttl_s
        formats = self._prompts.part_formats if part_formats is None else part_formats
        tags, vocab_size = self._prompts.reasoning_tags, client.info.vocab_size
        self._requests = RequestMaker(tokenizer, tags, vocab_size, formats, limits=grammar_limits)
        self.default_params = default_params or SamplingParams()
        self.chosen_defaults: Collection[str] = ()  # the names of those that a user chose instead of the model's
        self._hub = hub
        self._seeds = random.Random(seed)
        self._generations: dict[str, Generation] = {}

    @classmethod
    async def start(
        cls,
        model: Model = None,
        *,
        chat_template: str | Path | None = None,
        hf_token: str | bool | None = None,
        hang_timeout_s: float = DEFAULT_HANG_TIMEOUT_S,
        tool_call_parser: str | None = None,
        at_each_start: AtEachStart | None = None,
        **options: Any,
    ) -> Self:
        """Download the model if necessary, start its engine process and wait until it is ready.

        model, chat_template, hf_token, options: as for LLM. An engine process that dies later is restarted.
        hang_timeout_s: seconds without progress after which the engine is restarted; 0: never. tool_call_parser: name
        of the format in which the model writes tool calls; None: found in its chat template. at_each_start: changes the
        config for each start of the engine process. Raises ConfigError,
        ModelLoadError, or EngineDeadError if the first process dies.
        """
        if tool_call_parser is not None:
            format_named(tool_call_parser)
        config = await asyncio.to_thread(with_local_models, engine_config(model, options), hf_token)
        await asyncio.to_thread(check_models, config)
        text = await asyncio.to_thread(load_text, config, chat_template)
        client = await Supervisor.start(config, hang_timeout_s=hang_timeout_s, at_each_start=at_each_start)
        return cls.over(client, config, text, seed=config.seed, tool_call_parser=tool_call_parser)

    @classmethod
    def over(
        cls, client: Client, config: EngineConfig, text: Text, *, seed: int | None, tool_call_parser: str | None
    ) -> Self:
        """Return an AsyncEngine over an engine that was started with this config. text: the result of load_text.

        Raises ModelLoadError if the model reads images, and its directory does not say how.
        """
        tokenizer, template, default_params, pairs = text
        return cls(
            client,
            tokenizer,
            template,
            default_params=default_params,
            seed=seed,
            session_ttl_s=config.session_ttl,
            tool_call_parser=tool_call_parser,
            grammar_limits=GrammarLimits.of(config),
            images=api_arguments.image_reader(config, client.info, tokenizer),
            hub=config.hub,
            pairs=pairs,
        )

    def wrap_client(self, wrap: Callable[[Client], Client]) -> None:
        """Put something between this and the engine. No request may be running."""
        assert not self._generations, "requests know their client"
        self._client = wrap(self._client)

    @property
    def info(self) -> ModelInfo:
        """The loaded model and the engine's resolved settings."""
        return self._client.info

    @property
    def stats(self) -> EngineStats:
        """The latest statistics that the engine sent."""
        return self._client.stats

    @property
    def is_alive(self) -> bool:
        return self._client.is_alive

    @property
    def health(self) -> EngineHealth:
        """Whether the engine accepts requests, and if not, why."""
        return self._client.health

    @property
    def part_kinds(self) -> frozenset[PartKind]:
        """The kinds of parts that can be separated from text in the model's output."""
        return self._requests.kinds

    async def prepare(
        self, params: SamplingParams, *, options: RequestOptions | None = None, **fields: Unpack[PlanFields]
    ) -> RequestPlan:
        """Check everything that does not depend on the prompt, and return a plan for `generation`.

        Slow lookups run in a thread beside the event loop. Raises InvalidRequestError.
        """
        make_plan = partial(self._requests.plan, params, options=options, **fields)
        has_form = params.structured_outputs is not None
        is_slow = has_form or fields.get("offer") is not None
        plan = await self._threads.run(make_plan, is_grammar=has_form) if is_slow else make_plan()
        if plan.grammar is not None or params.dry_multiplier > 0 or plan.thinking_budget is not None:
            prepare, is_grammar = partial(self._requests.prepare, plan), not self._requests.has_checked(plan)
            await self._threads.run(prepare, is_grammar=is_grammar)
        return plan

    def request(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
        on_delta: OnDelta | None = None,
        split_reasoning: bool = False,
        thinking_budget: int | None = None,
    ) -> Generation:
        """Make a checked request; it is sent to the engine when the Generation is entered.

        request_id: must be unique among the running requests; None: a new id.
        on_delta: called with every delta at once, and with a last one for each choice that stays unfinished.
        split_reasoning: separate thoughts from text, if the model has reasoning tags. thinking_budget: upper limit of
        thinking tokens; only for a model with reasoning tags.
        Raises InvalidRequestError, ContextLengthError if the request can never be served, EngineDeadError.
        """
        plan = self._requests.plan(
            params, options=options, split_reasoning=split_reasoning, thinking_budget=thinking_budget
        )
        token_ids = api_arguments.plain_token_ids(prompt_token_ids)
        return self.generation(token_ids, plan, prompt=prompt, request_id=request_id, on_delta=on_delta)

    def generation(
        self,
        prompt_token_ids: list[int],
        plan: RequestPlan,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
        on_delta: OnDelta | None = None,
        stream_interval: int = 1,
        images: Sequence[ImageInput] = (),
    ) -> Generation:
        """Make a request from a plan that `prepare` has checked; otherwise like `request`, and as Generation says.

        images: those of a ModelInput, whose token_ids are the prompt.
        """
        if not self.is_alive:
            raise EngineDeadError(self.health.reason, retry_after_s=self.health.retry_after_s)
        request_id = request_id or uuid.uuid4().hex
        if request_id in self._generations:
            raise InvalidRequestError(f"a request {request_id} is already running", param="request_id")
        seed = self._seeds.getrandbits(SEED_BITS) if plan.params.seed is None else plan.params.seed
        request, stream = self._requests.make(
            request_id, prompt_token_ids, plan, seed=seed, prompt=prompt, images=images
        )
        check_request(request, self.info)
        return Generation(self._client, request, stream, self._generations, on_delta, stream_interval)

    async def generate(
        self,
        prompt: str | Sequence[int] | Mapping[str, Any] | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        options: RequestOptions | None = None,
        split_reasoning: bool | None = None,
        thinking_budget: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Stream the output of one request: yields the same RequestOutput as it grows.

        prompt: as for LLM.stream. sampling_params: None: the model's recommendation. options: the request's priority,
        session and the like. With best_of, everything comes at the end.
        split_reasoning, thinking_budget: as in `request`; split_reasoning None means True for a conversation.
        lora_request: the adapter, which is loaded if it is not.
        Closing the iterator aborts the request. Raises as `request` does, and EngineError if the engine fails the
        request: QueueFullError, DeadlineExceededError.
        """
        check_sampling_params(sampling_params)
        text: str | None = None
        if is_chat := api_arguments.is_conversation(prompt):
            check_writes_text(self.info)
            token_ids, images = await self.chat_input(api_arguments.with_paths(prompt))
        else:
            text, given = api_arguments.prompt_parts(prompt)
            sources = api_arguments.prompt_images(prompt)
            token_ids, images = await self.prompt_input((text or "") if given is None else given, sources)
        params = sampling_params or self.default_params
        plan = await self.prepare(
            params,
            options=options,
            split_reasoning=is_chat if split_reasoning is None else split_reasoning,
            thinking_budget=thinking_budget,
            split_parts=is_chat,
            adapter=await self._adapter(lora_request),
        )
        generation = self.generation(token_ids, plan, prompt=text, request_id=request_id, images=images)
        async with generation:
            async for _ in generation:
                yield generation.output

    async def _adapter(self, wanted: LoRARequest | None) -> str:
        """Return the name of an adapter, and load it if it is not loaded."""
        if wanted is None:
            return ""
        if wanted.name not in self.info.adapters and wanted.path:
            await self.load_adapter(wanted.name, wanted.path)
        return wanted.name

    async def load_adapter(self, name: str, path: str, *, replaces: bool = False) -> None:
        """Load a LoRA adapter, which requests then name; for engines with enable_lora.

        path: a directory that PEFT has written, a GGUF file of llama.cpp, or an id on a hub. replaces: whether to
        replace an adapter of this name. Raises InvalidRequestError if the name is taken or there is no room,
        ModelLoadError for an unusable adapter, EngineDeadError.
        """
        local = await asyncio.to_thread(local_adapter, path, self._hub)
        await self._client.change_adapter(name, str(local), replaces=replaces)

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter; those that it serves go on. Raises InvalidRequestError."""
        await self._client.change_adapter(name)

    async def abort(self, request_id: str) -> None:
        """Abort a request; its iterator ends with finish_reason "abort". Unknown ids are ignored."""
        if request_id in self._generations:
            self._client.abort([request_id])

    async def close(self, reason: str = "the server is shutting down") -> None:
        """Stop the engine process. Running requests get an EngineDeadError with the reason, and so do later ones."""
        self._threads.close()
        for generation in self._generations.values():
            generation.fail(EngineDeadError(reason))
        await self._client.close()
        await asyncio.to_thread(self._requests.close)
