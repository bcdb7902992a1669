"""LLM: a model in this process, for scripts and notebooks, with the interface of vLLM's class.

    with LLM("Qwen/Qwen3-0.6B") as llm:
        for output in llm.generate(["Once upon a time", "The capital of France is"]):
            print(output.outputs[0].text)

Calls of several threads wait for each other. A program that serves many users at once should use AsyncEngine.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, cast

from pagewick.api_arguments import (
    Model,
    Prompt,
    all_prompts,
    check_conversation,
    check_sampling_params,
    engine_config,
    image_reader,
    is_conversation,
    load_text,
    request_arguments,
)
from pagewick.config import EngineConfig
from pagewick.engine.admission import check_writes_text
from pagewick.engine.messages import EngineStats, RequestOptions
from pagewick.engine.model_info import ModelInfo
from pagewick.engine.preflight import check_models
from pagewick.engine.startup import starting
from pagewick.errors import EngineDeadError, InvalidRequestError
from pagewick.local_models import with_local_models
from pagewick.lora_request import LoRARequest
from pagewick.offline import Job, OfflineRunner, OnStep, progress_bar
from pagewick.offline_jobs import Adapters, JobMaker, OfflineAdapters, Options
from pagewick.outputs import RequestOutput
from pagewick.pooled_calls import PooledCalls
from pagewick.sampling_params import SamplingParams
from pagewick.text.content_parts import Message
from pagewick.text.grammars.constraint import GrammarCompiler
from pagewick.text.grammars.limits import GrammarLimits
from pagewick.text.prompts import ChatOptions, PromptEncoder, with_budget
from pagewick.text.request_maker import PlanFields, RequestMaker
from pagewick.text.request_stream import num_candidates
from pagewick.text.tokenizer import Tokenizer
from pagewick.text.tool_calls.checks import checked_offer


class LLM(PooledCalls):
    """An engine, its tokenizer and its chat template.

    model: a directory, a GGUF file, an id (Qwen/Qwen3-0.6B, unsloth/Qwen3-8B-GGUF:Q8_0), or an EngineConfig; None: the
    built-in model. options: fields of EngineConfig, under any of their names; docs/coming-from.md explains what becomes
    of vLLM's other arguments. config: an EngineConfig, instead of both. chat_template: the source of a template, or a
    file, in place of the model's. hf_token: a token for the hub; None or True: the one of the environment.
    Raises ConfigError for a wrong option, ArgumentError for a wrong type, ModelLoadError for an unusable model.
    """

    def __init__(
        self,
        model: Model = None,
        *,
        config: EngineConfig | None = None,
        chat_template: str | Path | None = None,
        hf_token: str | bool | None = None,
        **options: Any,
    ) -> None:
        if config is not None and model is not None:
            options["model"] = model
        config = with_local_models(engine_config(config or model, options), hf_token)
        models = check_models(config)
        self._is_closed = False
        with starting(config, models) as weights:
            self._tokenizer, template, self._default_params, self._pairs = load_text(config, chat_template)
            # Not at the top: this imports torch, which takes seconds. A wrong model name is reported before that.
            from pagewick.engine.engine import Engine

            grammars = GrammarCompiler(lambda: self._tokenizer, config.grammar_cache_size)
            self._engine = Engine(config, grammars=grammars, weights=weights)
        images = image_reader(config, self.info, self._tokenizer)
        prompts = PromptEncoder(self._tokenizer, template, max_model_len=self.info.max_model_len, images=images)
        self._prompts = prompts
        self._requests = RequestMaker(
            self._tokenizer,
            prompts.reasoning_tags,
            self.info.vocab_size,
            formats=prompts.part_formats,
            limits=GrammarLimits.of(config),
        )
        self._runner = OfflineRunner(self._engine, self._requests, config.seed)
        self._maker = JobMaker(prompts, self._default_params, OfflineAdapters(self._engine, config))

    @property
    def info(self) -> ModelInfo:
        """The loaded model and the engine's resolved settings."""
        return self._engine.info

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        priority: int | Sequence[int] | None = None,
        options: Options = None,
        lora_request: Adapters = None,
        on_step: OnStep | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Complete one prompt or many in one batch; returns the outputs in the order of the prompts.

        prompts: texts, lists of token ids, or maps with "prompt" or "prompt_token_ids", and with "multi_modal_data":
        {"image": ...} for a model that reads images, one or a list, with a placeholder in the prompt for each.
        sampling_params: one for all prompts or one for each; None: get_default_sampling_params().
        use_tqdm: show a progress bar (vLLM's name).
        priority: a number for all prompts or one for each; lower numbers run first, as in vLLM.
        options: options for serving the requests, one for all prompts or one for each.
        lora_request: LoRA adapters, one for all prompts or one for each; None: the model as it is.
        on_step: called after every step with all outputs so far. others: vLLM's, noted or refused.
        Raises InvalidRequestError, ContextLengthError if a prompt does not fit, ModelLoadError for an unusable adapter,
        EngineError.
        """
        request_arguments("LLM.generate", others, ("use_tqdm", "priority", "options", "lora_request", "on_step"))
        self._check_open()
        encoded = [self._maker.encode(prompt) for prompt in all_prompts(prompts)]
        jobs = self._maker.jobs(encoded, sampling_params, options, priority=priority, lora_request=lora_request)
        return self._run(jobs, use_tqdm, on_step)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        priority: int | Sequence[int] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Options = None,
        lora_request: Adapters = None,
        split_reasoning: bool = True,
        thinking_budget: int | None = None,
        **how: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Respond to one conversation or many, or to none: [] gives []. Parameters as in `generate`.

        messages: plain data in OpenAI's form; images as text/content_parts.py says. how: options for rendering, such as
        chat_template_kwargs={"enable_thinking": False}. split_reasoning: put thoughts into each choice's `reasoning`
        instead of its `text`. thinking_budget: upper limit of thinking tokens.
        """
        is_list = isinstance(messages, list | tuple) and not is_conversation(messages)
        conversations = cast(Sequence[Sequence[Message]], messages if is_list else [messages])
        for conversation in conversations:
            check_conversation(conversation)
        how = with_budget(how, thinking_budget)
        self._check_open()
        check_writes_text(self.info)
        encoded = [self._maker.encode_chat(conversation, tools, how) for conversation in conversations]
        fields = _plan_fields(split_reasoning, thinking_budget, tools, is_chat=True)
        jobs = self._maker.jobs(
            encoded, sampling_params, options, priority=priority, lora_request=lora_request, fields=fields
        )
        return self._run(jobs, use_tqdm)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: RequestOptions | None = None,
        thinking_budget: int | None = None,
        lora_request: LoRARequest | None = None,
        **how: Unpack[ChatOptions],
    ) -> Generator[str]:
        """Stream the text for one prompt or one conversation; without the thoughts of a conversation.

        Closing the iterator aborts the request. Raises as `generate` does.
        """
        check_sampling_params(sampling_params)
        params = sampling_params or self._default_params
        if params.n != 1:
            raise InvalidRequestError("stream gives one choice; use stream_outputs for n > 1", param="n")
        outputs = self.stream_outputs(
            prompt,
            params,
            tools=tools,
            options=options,
            thinking_budget=thinking_budget,
            lora_request=lora_request,
            **how,
        )
        return _new_text(outputs)

    def stream_outputs(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: RequestOptions | None = None,
        split_reasoning: bool | None = None,
        thinking_budget: int | None = None,
        lora_request: LoRARequest | None = None,
        **how: Unpack[ChatOptions],
    ) -> Generator[RequestOutput]:
        """Stream the output for one prompt or one conversation: yields the same RequestOutput as it grows.

        split_reasoning: None means True for a conversation and False for a prompt. Closing the iterator aborts the
        request. Raises as `generate` does.
        """
        self._check_open()
        check_sampling_params(sampling_params)
        if is_chat := is_conversation(prompt):
            check_writes_text(self.info)
            encoded = self._maker.encode_chat(prompt, tools, with_budget(how, thinking_budget))
        else:
            encoded = self._maker.encode(cast(Prompt, prompt))
        params = sampling_params or self._default_params
        if num_candidates(params) > params.n:
            raise InvalidRequestError("best_of cannot be streamed; use generate", param="best_of")
        is_split = is_chat if split_reasoning is None else split_reasoning
        fields = _plan_fields(is_split, thinking_budget, tools, is_chat=is_chat)
        (job,) = self._maker.jobs([encoded], params, options, lora_request=lora_request, fields=fields)
        return self._runner.stream(job)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """Render the prompt that `chat` would use for a conversation, as text."""
        rendered = self._prompts.render_chat(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=template_kwargs,
        )
        return rendered.text

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that the model's generation_config.json recommends."""
        return self._default_params

    def get_stats(self) -> EngineStats:
        """Return the engine's statistics."""
        return self._engine.stats()

    def close(self) -> None:
        """Free the model and stop the other ranks. The LLM cannot be used afterwards."""
        self._is_closed = True
        self._runner.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineDeadError("this LLM is closed; make another one")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, jobs: Sequence[Job], show_progress: bool, on_step: OnStep | None = None) -> list[RequestOutput]:
        if not show_progress:
            return self._runner.run(jobs, on_step)
        with progress_bar(len(jobs)) as show:
            return self._runner.run(jobs, show)


def _plan_fields(
    split_reasoning: bool, thinking_budget: int | None, tools: Sequence[Mapping[str, Any]] | None, *, is_chat: bool
) -> PlanFields:
    return PlanFields(
        split_reasoning=split_reasoning,
        thinking_budget=thinking_budget,
        split_parts=is_chat,
        offer=checked_offer(tools or ()),
    )


def _new_text(outputs: Generator[RequestOutput]) -> Generator[str]:
    """Yield the text that each output adds to its only choice."""
    num_given = 0
    with closing(outputs):
        for output in outputs:
            text = output.outputs[0].text
            if len(text) > num_given:
                yield text[num_given:]
                num_given = len(text)
