"""Checks arguments of LLM and AsyncEngine: converts their other forms, rejects wrong ones. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, cast

from pagewick.config import BUILTIN_MODEL, EngineConfig
from pagewick.engine.image_settings import image_settings
from pagewick.engine.model_info import ModelInfo
from pagewick.errors import ArgumentError, ConfigError, InvalidRequestError, ModelLoadError, UnsupportedError
from pagewick.foreign_names import REQUEST_ARGUMENTS, own_arguments
from pagewick.images.addresses import is_data
from pagewick.images.sources import ImageSource, is_source
from pagewick.models.config import architecture_of
from pagewick.models.end_tokens import eos_token_ids as check_end_tokens
from pagewick.models.registry import read_config
from pagewick.option_checks import flag_of
from pagewick.other_names import ALIASES
from pagewick.sampling_params import SamplingParams, default_sampling_params
from pagewick.text.chat_template import ChatTemplate, template_source
from pagewick.text.content_parts import Message
from pagewick.text.image_prompts import MULTI_MODAL_DATA, ImageReader
from pagewick.text.moondream import moondream_template
from pagewick.text.pair_prompts import PairPrompts, pair_text_of
from pagewick.text.tokenizer import Tokenizer
from pagewick.text.tokenizer_files import read_settings
from pagewick.weights.description import is_gguf, read_configs
from pagewick.weights.hub import local_model

_Item = TypeVar("_Item")

Model = EngineConfig | str | os.PathLike[str] | None
Prompt = str | Sequence[int] | Mapping[str, Any]

# The keys of a dict that is a prompt, and what becomes of vLLM's others.
_PROMPT_PARTS = ("prompt", "prompt_token_ids")
_NOT_IN_PROMPTS = {
    "cache_salt": "give options=RequestOptions(cache_salt=...)",
    "multi_modal_uuids": "the prefix cache knows an image by its pixels; leave it out",
    "mm_processor_kwargs": "the model's own settings apply to its images; leave it out",
}
_DRAFTING = (lambda config: config.speculative_method != "none", "--speculative-method or --speculative-model")
_LOOKING_UP = (lambda config: config.speculative_method == "ngram", "--speculative-method ngram")
# Options that have an effect only with others: whether these are set, and their flags.
_PARTNERS: Mapping[str, tuple[Callable[[EngineConfig], bool], str]] = {
    "num_speculative_tokens": _DRAFTING,
    "speculative_max_batch": _DRAFTING,
    "ngram_prompt_lookup_min": _LOOKING_UP,
    "ngram_prompt_lookup_max": _LOOKING_UP,
    "kv_cache_disk_size": (lambda config: config.kv_cache_disk is not None, "--kv-cache-disk"),
    "quantized_cache_size": (
        lambda config: config.quantization is not None and config.quantized_cache,
        "--quantization and --quantized-cache",
    ),
}
_FLAG = re.compile("--[a-z][a-z0-9-]*")


def engine_config(model: Model, options: Mapping[str, Any]) -> EngineConfig:
    """Make a config from a model's name and options, or return the config given.

    Raises ArgumentError, and ConfigError, which names options as arguments and not as flags.
    """
    try:
        return _config_of(model, options)
    except ConfigError as error:
        names = {flag_of(name): name for name in (*(one.name for one in fields(EngineConfig)), *options)}
        error.args = (_FLAG.sub(lambda match: names.get(match[0], match[0]), str(error)),)
        raise


def _config_of(model: Model, options: Mapping[str, Any]) -> EngineConfig:
    if isinstance(model, EngineConfig):
        if options:
            raise ConfigError(f"give a config or options, not both; got {', '.join(options)} beside a config")
        check_given(model, {name: flag_of(name) for name in options_of(model)})
        return model
    if model is not None and not isinstance(model, str | os.PathLike):
        raise ArgumentError(f"model must be a directory, a Hugging Face id or an EngineConfig; got {_shown(model)}")
    config = EngineConfig.from_options(**{} if model is None else {"model": os.fspath(model)}, **options)
    given = {name: flag_of(name) for name, value in options.items() if value is not None}
    check_given(config, {ALIASES.get(name, (name, None))[0]: flag for name, flag in given.items()})
    return config


def options_of(config: EngineConfig) -> list[str]:
    """Return the fields whose values are not the defaults."""
    return [one.name for one in fields(config) if getattr(config, one.name) != one.default]


def check_given(config: EngineConfig, given: Mapping[str, str]) -> None:
    """Raise ConfigError for an option of the user that has no effect beside the others.

    given: the options, each with the flag to name. Variables and files are left alone: they may be meant for others.
    """
    for reason in _idle_options(config, given).values():
        raise ConfigError(reason)


def without_idle_options(config: EngineConfig, names: Iterable[str]) -> EngineConfig:
    """Return a config with the defaults in place of those of these options that have no effect beside the others."""
    idle = _idle_options(config, {name: flag_of(name) for name in names})
    defaults: dict[str, Any] = {one.name: one.default for one in fields(config) if one.name in idle}
    return replace(config, **defaults)


def _idle_options(config: EngineConfig, given: Mapping[str, str]) -> dict[str, str]:
    """Return those of the given options that have no effect, each with the error that says why."""
    found = {}
    for name, (acts, partner) in _PARTNERS.items():
        if name in given and not acts(config):
            found[name] = f"{given[name]} has no effect without {partner}; give that, too, or leave it out"
    if "mmproj" in given and config.language_model_only:
        found["mmproj"] = f"{given['mmproj']} has no effect beside --language-model-only; leave one of them out"
    for name, others in (("revision", ()), ("hub", (config.tokenizer, config.speculative_model))):
        if name in given and not any(one and local_model(one) is None for one in others) and _is_local(config):
            place = "built in" if config.model == BUILTIN_MODEL else "on this disk"
            found[name] = f"{given[name]} has no effect: {config.model} is {place}, not a model on a hub; leave it out"
    return found


def _is_local(config: EngineConfig) -> bool:
    return local_model(config.model, config.weight_file) is not None


def load_text(
    config: EngineConfig, chat_template: str | Path | None
) -> tuple[Tokenizer, ChatTemplate | None, SamplingParams, PairPrompts | None]:
    """Load the tokenizer, the chat template, the sampling parameters that generation_config.json recommends, and what
    makes the prompts of a reranker; None for a model of which nothing says that it is one.

    config: names directories or files on this disk. chat_template: the source of a template that replaces the model's,
    or a file with it. Raises ModelLoadError, also for a tokenizer with tokens that the model lacks, and ConfigError for
    a file that cannot be read.
    """
    path = Path(config.model)
    settings, eos_token_ids = ({}, None) if config.tokenizer is None else read_settings(path)
    place = path if config.tokenizer is None else Path(config.tokenizer)
    tokenizer = Tokenizer.from_directory(place, eos_token_ids)
    model_config, generation_config = read_configs(path)
    # The engine reads them; a wrong one is found before it starts, and by `pagewick doctor`.
    check_end_tokens(model_config, generation_config)
    try:
        default_params = default_sampling_params(generation_config)
    except ModelLoadError as error:
        message = str(error).replace("the model's generation_config.json", f"general.sampling.* in {path}")
        raise ModelLoadError(message) if is_gguf(path) else error from None
    _check_vocabulary(place, path, model_config, tokenizer)
    own_template = moondream_template(model_config, tokenizer)
    if chat_template is None:
        template = ChatTemplate.from_directory(place, tokenizer)
        if template is None and place != path:
            template = ChatTemplate.from_directory(path, tokenizer, settings)
        if template is None and own_template is not None:
            template = ChatTemplate({"default": own_template}, tokenizer)
    else:
        template = ChatTemplate({"default": template_source(chat_template)}, tokenizer)
    pairs = PairPrompts.find(
        architecture_of(model_config),
        tokenizer,
        template,
        pair_text_of(tokenizer.config if config.tokenizer is None else settings),
        is_qwen3_reranker=config.rerank,
        is_whole=is_gguf(path),
        is_encoder=read_config(model_config).encoder is not None,
    )
    return tokenizer, template, default_params, pairs


def _check_vocabulary(place: Path, model: Path, config: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    # Special tokens may lie outside: Gemma's tokenizers have one for images, which text models lack.
    num_tokens = read_config(config).vocab_size
    if (last := tokenizer.last_token) is not None and last[1] >= num_tokens:
        fix = "get config.json, tokenizer and weights from one repository"
        if place != model:
            fix = "give the model's own tokenizer with --tokenizer, or leave it out"
        elif is_gguf(model):
            fix = "use another file of this model, or give its tokenizer with --tokenizer"
        raise ModelLoadError(
            f"the tokenizer of {place} does not belong to its model: {last[0]!r} is token {last[1]}, and the model's "
            f"{num_tokens} tokens end at {num_tokens - 1}\n  {fix}"
        )


def request_arguments(function: str, options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the known arguments of a function of LLM, and note or refuse vLLM's others, as own_arguments does.

    Raises UnsupportedError, and ArgumentError.
    """
    for name in options.keys() - known:
        if name in SamplingParams.__dataclass_fields__:
            raise ArgumentError(f"{function} has no argument {name}; give it SamplingParams({name}=...)")
    return own_arguments(function, options, known, REQUEST_ARGUMENTS)


def check_sampling_params(given: object) -> None:
    """Raise ArgumentError unless these are SamplingParams, a list of them, or None."""
    for one in given if isinstance(given, list | tuple) else [given]:
        if isinstance(one, Mapping):
            fields = ", ".join(f"{name}={value!r}" for name, value in one.items())
            raise ArgumentError(f"sampling_params must be SamplingParams; write SamplingParams({fields})"[:400])
        if one is not None and not isinstance(one, SamplingParams):
            raise ArgumentError(f"sampling_params must be SamplingParams, or one for each prompt; got {_shown(one)}")


def check_prompt(prompt: object) -> None:
    """Raise ArgumentError unless this can be a prompt."""
    if not isinstance(prompt, str | Mapping | Sequence) or isinstance(prompt, bytes | bytearray):
        raise ArgumentError(f"a prompt must be a text, a list of token ids or a dict with one; got {_shown(prompt)}")


def all_prompts(given: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return one prompt, or many, as many. Raises ArgumentError for what cannot be a prompt."""
    check_prompt(given)
    is_one = isinstance(given, str | Mapping) or (bool(given) and is_token_id(given[0]))
    return cast(Sequence[Prompt], [given] if is_one else given)


def prompt_parts(prompt: object) -> tuple[str | None, list[int] | None]:
    """Return a prompt's text and its token ids; only a dict may have both, and the model then reads the token ids.

    Raises ArgumentError, and InvalidRequestError for entries that are not token ids.
    """
    check_prompt(prompt)
    key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    parts: Mapping[Any, Any] = prompt if isinstance(prompt, Mapping) else {key: prompt}
    for name, value in parts.items():
        if name not in (*_PROMPT_PARTS, MULTI_MODAL_DATA) and value:
            reason = _NOT_IN_PROMPTS.get(name, f"known are {' and '.join(_PROMPT_PARTS)}")
            raise ArgumentError(f"a prompt has no {name}; {reason}")
    text, token_ids = parts.get("prompt"), parts.get("prompt_token_ids")
    if not isinstance(text, str | None) or (text is None and token_ids is None):
        raise ArgumentError(f"a dict needs {' or '.join(_PROMPT_PARTS)} to be a prompt; got {_shown(prompt)}")
    if token_ids is None:
        return text, None
    check_prompt(token_ids)
    return text, plain_token_ids(token_ids)


def prompt_images(prompt: object) -> list[ImageSource]:
    """Return the images of a prompt, {"multi_modal_data": {"image": one or a list of them}} as vLLM has it.

    A string is a data: address or the path of a file. Raises ArgumentError, and UnsupportedError for sound and video.
    """
    data = prompt.get(MULTI_MODAL_DATA) if isinstance(prompt, Mapping) else None
    if data is None:
        return []
    if not isinstance(data, Mapping):
        raise ArgumentError(f'{MULTI_MODAL_DATA} must be a dict such as {{"image": image}}; got {_shown(data)}')
    if others := [str(name) for name, value in data.items() if name != "image" and value is not None]:
        message = f"{MULTI_MODAL_DATA} has {others[0][:80]!r}; of these, Pagewick reads images only"
        raise UnsupportedError(message, param=MULTI_MODAL_DATA)
    given = data.get("image")
    images = given if isinstance(given, list | tuple) else [] if given is None else [given]
    for image in images:
        if not is_source(image):
            message = "an image must be a path, bytes, a data: address, an image of Pillow's or an array"
            raise ArgumentError(f"{message}; got {_shown(image)}")
    return [_with_path(image) for image in images]


def refuse_images(prompts: Iterable[object]) -> None:
    """Raise UnsupportedError for prompts with images, where embeddings are made."""
    if any(map(prompt_images, prompts)):
        raise UnsupportedError("embeddings are made of texts only; leave the images out", param=MULTI_MODAL_DATA)


def with_paths(messages: Sequence[Message]) -> list[Message]:
    """Return messages of a Python program, in which the string of {"type": "image", "image": "..."} may be a path."""

    def read(part: Any) -> Any:
        if isinstance(part, Mapping) and part.get("type") == "image" and isinstance(part.get("image"), str):
            return {**part, "image": _with_path(part["image"])}
        return part

    return [
        {**one, "content": [read(part) for part in one["content"]]} if isinstance(one.get("content"), list) else one
        for one in messages
    ]


def _with_path(image: ImageSource) -> ImageSource:
    return Path(image) if isinstance(image, str) and "://" not in image and not is_data(image) else image


def image_reader(config: EngineConfig, info: ModelInfo, tokenizer: Tokenizer) -> ImageReader | None:
    """Return what reads images for a model; None if it reads none. Raises ModelLoadError for missing settings."""
    if (token_id := info.image_token_id) is None:
        return None
    if (settings := image_settings(config)) is None:
        raise ModelLoadError(f"{config.model} has no preprocessor_config.json any more; download it again")
    token = tokenizer.decode([token_id], skip_special_tokens=False)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return ImageReader.of(settings, token_id, token, id_of=tokenizer.id_of, encode=encode)


def plain_token_ids(token_ids: Sequence[Any]) -> list[int]:
    """Return token ids, which may be numpy's numbers, as plain ones. Raises InvalidRequestError for other entries."""
    if {*map(type, token_ids)} <= {int}:
        return list(token_ids)
    if not all(map(is_token_id, token_ids)):
        raise InvalidRequestError("a prompt must be a text or a list of token ids", param="prompt")
    return list(map(int, token_ids))


def is_token_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_conversation(messages: object) -> None:
    """Raise ArgumentError unless these are messages."""
    if not is_conversation(messages):
        example = '[{"role": "user", "content": "Hello"}]'
        raise ArgumentError(f"messages must be a list such as {example}; got {_shown(messages)}")


def is_conversation(value: object) -> TypeGuard[Sequence[Message]]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        return False
    return all(isinstance(message, Mapping) for message in value)


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."


def for_each(name: str, given: _Item | Sequence[_Item] | None, default: _Item, num_prompts: int) -> Sequence[_Item]:
    """Expand a value given for all prompts to one value for each. Raises InvalidRequestError for a wrong number."""
    if given is None or not isinstance(given, Sequence):
        return [default if given is None else given] * num_prompts
    if len(given) != num_prompts:
        message = f"{num_prompts} prompts and {len(given)} {name}: give one for all, or one for each"
        raise InvalidRequestError(message, param=name)
    return given
