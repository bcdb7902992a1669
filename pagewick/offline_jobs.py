"""JobMaker: turns the arguments of LLM's methods into jobs for OfflineRunner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from msgspec import structs

from pagewick.api_arguments import (
    Prompt,
    check_sampling_params,
    for_each,
    prompt_images,
    prompt_parts,
    request_arguments,
    with_paths,
)
from pagewick.engine.messages import RequestOptions
from pagewick.errors import ArgumentError, InvalidRequestError
from pagewick.local_models import local_adapter
from pagewick.lora_request import LoRARequest
from pagewick.offline import EncodedPrompt, Job
from pagewick.sampling_params import SamplingParams
from pagewick.text.content_parts import Message
from pagewick.text.image_prompts import MULTI_MODAL_DATA, PromptTokens
from pagewick.text.prompts import ChatOptions, PromptEncoder
from pagewick.text.request_maker import PlanFields
from pagewick.text.truncation import tokens_to_keep

if TYPE_CHECKING:
    from pagewick.config import EngineConfig
    from pagewick.engine.engine import Engine

Options = RequestOptions | Sequence[RequestOptions] | None
Adapters = LoRARequest | Sequence[LoRARequest | None] | None


class JobMaker:
    """default_params: the sampling parameters of jobs that bring none. adapters: loads those that requests name."""

    def __init__(self, prompts: PromptEncoder, default_params: SamplingParams, adapters: OfflineAdapters) -> None:
        self._prompts = prompts
        self._default_params = default_params
        self._adapters = adapters

    def jobs(
        self,
        prompts: Sequence[EncodedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        options: Options,
        *,
        priority: int | Sequence[int] | None = None,
        lora_request: Adapters = None,
        fields: PlanFields | None = None,
    ) -> list[Job]:
        """Return a job for each prompt; the other arguments are one for all or one for each, as in LLM.generate."""
        check_sampling_params(sampling_params)
        all_params = for_each("sampling_params", sampling_params, self._default_params, len(prompts))
        all_options = for_each("options", options, RequestOptions(), len(prompts))
        if priority is not None:
            if any(one.priority for one in all_options):
                raise InvalidRequestError("give a priority or options that have one, not both", param="priority")
            priorities = for_each("priority", priority, 0, len(prompts))
            all_options = [structs.replace(one, priority=p) for one, p in zip(all_options, priorities, strict=True)]
        all_fields = [fields or PlanFields() for _ in prompts]
        if lora_request is not None:
            _check_adapters(lora_request)
            wanted = cast("Sequence[LoRARequest | None]", for_each("lora_request", lora_request, None, len(prompts)))
            names = self._adapters.names_of(wanted)
            all_fields = [{**one, "adapter": name} for one, name in zip(all_fields, names, strict=True)]
        return [Job(*parts) for parts in zip(prompts, all_params, all_options, all_fields, strict=True)]

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """Return a prompt as token ids. Raises InvalidRequestError, ArgumentError."""
        text, token_ids = prompt_parts(prompt)
        tokens = self._prompts.place_images((text or "") if token_ids is None else token_ids, prompt_images(prompt))
        return self._encoded(text, tokens, MULTI_MODAL_DATA)

    def encode_beginning(self, prompt: Prompt, truncate_prompt_tokens: int | None) -> EncodedPrompt:
        """Return a prompt without images as token ids, the first ones if they are more than this number; -1: than fit.

        Raises InvalidRequestError, ArgumentError.
        """
        if truncate_prompt_tokens is None:
            return self.encode(prompt)
        text, token_ids = prompt_parts(prompt)
        if token_ids is not None:
            return EncodedPrompt(text, token_ids[: tokens_to_keep(truncate_prompt_tokens, self._prompts.max_model_len)])
        kept = self._prompts.encode(
            text or "", truncate_prompt_tokens=truncate_prompt_tokens, num_output_tokens=0, keeps_beginning=True
        )
        return EncodedPrompt(text, kept)

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, how: ChatOptions
    ) -> EncodedPrompt:
        """Return a conversation as token ids. Raises InvalidRequestError, ArgumentError."""
        own = request_arguments("LLM.chat", how, ChatOptions.__annotations__)
        rendered = self._prompts.render_chat(with_paths(messages), tools, **cast(ChatOptions, own))
        return self._encoded(rendered.text, self._prompts.place_rendered(rendered), "messages")

    def _encoded(self, text: str | None, tokens: PromptTokens, param: str) -> EncodedPrompt:
        images = [picture for one in tokens.images for picture in self._prompts.read_image(one, param)]
        return EncodedPrompt(text, tokens.token_ids, images)


class OfflineAdapters:
    """Loads the adapters that calls name when they are first named. config: of the engine."""

    def __init__(self, engine: Engine, config: EngineConfig) -> None:
        self._engine = engine
        self._hub = config.hub
        # From the least recently used to the last one used, with the path as the caller wrote it.
        self._used: dict[str, str] = dict(config.adapter_paths)

    def names_of(self, wanted: Sequence[LoRARequest | None]) -> list[str]:
        """Return the names of adapters, empty for None, after loading those that are not loaded.

        Where there is no room, adapters that this call does not name are unloaded, the least recently used first.
        Raises InvalidRequestError, ModelLoadError and ConfigError.
        """
        given = {one.name: one for one in wanted if one is not None}
        if clash := next((one for one in wanted if one is not None and one.path != given[one.name].path), None):
            raise InvalidRequestError(f"two adapters of one call have the name {clash.name!r}", param="lora_request")
        for one in given.values():
            self._use(one, keep=given)
        return ["" if one is None else one.name for one in wanted]

    def _use(self, wanted: LoRARequest, keep: Mapping[str, LoRARequest]) -> None:
        path = self._used.pop(wanted.name, None)
        if path is not None and wanted.path not in ("", path):
            self._engine.unload_adapter(wanted.name)
            path = None
        if path is None:
            if not wanted.path:
                raise InvalidRequestError(
                    f"there is no adapter {wanted.name!r}: give its lora_path", param="lora_request"
                )
            local = str(local_adapter(wanted.path, self._hub))
            spare = next((one for one in self._used if one not in keep), None)
            if len(self._used) >= self._engine.info.max_adapters and spare is not None:
                self._engine.unload_adapter(spare)
                del self._used[spare]
            self._engine.load_adapter(wanted.name, local)
            path = wanted.path
        self._used[wanted.name] = path


def _check_adapters(given: object) -> None:
    """Raise ArgumentError unless these are a LoRARequest, or a list of them and of None."""
    for one in given if isinstance(given, list | tuple) else [given]:
        if one is not None and not isinstance(one, LoRARequest):
            raise ArgumentError(f"lora_request must be a LoRARequest, or one for each prompt; got {one!r}"[:300])
