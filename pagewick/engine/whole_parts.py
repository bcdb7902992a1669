"""Parts of prompts that a step must compute to their end, since their tokens see those behind them. No torch.

In models whose layers see images whole these are the images, in encoders the prompts themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from pagewick.config import EngineConfig
from pagewick.engine.messages import EngineRequest
from pagewick.errors import ConfigError
from pagewick.log import get_logger
from pagewick.models.config import ModelConfig
from pagewick.models.parts import AttentionConfig

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WholeParts:
    """most: tokens of the largest part. spans: returns (begin, end) of a request's parts, in order."""

    most: int
    spans: Callable[[EngineRequest], Sequence[tuple[int, int]]]


# A chunk of a prompt may end anywhere.
NO_PARTS: Final = WholeParts(0, lambda request: ())


def spans_of_images(request: EngineRequest, num_leading: int = 0) -> Sequence[tuple[int, int]]:
    """num_leading: the number of tokens ahead of an image that see it as its own tokens do."""
    return [(image.start - num_leading, image.end) for image in request.images]


def span_of_prompt(request: EngineRequest) -> Sequence[tuple[int, int]]:
    return [(0, len(request.prompt_token_ids))]


def whole_parts(config: EngineConfig, model: ModelConfig) -> WholeParts:
    """Return a model's parts. config: the resolved one. Raises ConfigError if a step is too small for an image."""
    if model.encoder is not None:
        assert config.max_model_len is not None, "resolve() sets it"
        return WholeParts(config.max_model_len, span_of_prompt)
    most = max_image_tokens(config, model)
    if not most or model.vision is None:
        return NO_PARTS
    return WholeParts(most, partial(spans_of_images, num_leading=model.vision.num_leading))


def check_encoder_options(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError for what the user's config asks for and an encoder, or a model that writes captions, cannot do.

    config: not yet resolved.
    """
    if config.enable_lora and (model.encoder is not None or model.image_attention is not None):
        raise ConfigError(
            f"LoRA adapters of {model.architecture} are not supported; merge the adapter into the model, or leave out "
            "--lora, --lora-modules and --enable-lora"
        )
    image, length = model.image_attention, config.max_model_len
    if image is not None and length is not None and length <= image.num_tokens:
        raise ConfigError(
            f"--max-model-len {length} leaves no room for a caption: its image alone has {image.num_tokens} tokens\n"
            f"  give more, up to {model.longest_context}, or leave it out"
        )
    if model.encoder is None:
        return
    if config.kv_cache_disk is not None:
        raise ConfigError(
            "--kv-cache-disk keeps prefixes that prompts share, and with this model they share none: tokens see those "
            "behind them\n  leave it out"
        )
    if config.swap_space:
        raise ConfigError(
            "--swap-space keeps KV blocks for later, and this model has none that are used again: it computes a prompt "
            "in one step\n  leave it out"
        )
    if config.speculative_method != "none":
        raise ConfigError(
            f"{'--speculative-model' if config.speculative_model else '--speculative-method'} makes texts faster, and "
            f"this model writes none: {model.architecture} is an encoder\n  leave it out"
        )


def for_encoder(config: EngineConfig, model: ModelConfig, *, is_first: bool = True) -> EngineConfig:
    """Return a resolved config as an encoder needs it, or as it is for another model.

    A step then has room for the longest prompt. Prompts share no prefixes, since every token depends on all others. No
    step is one that a CUDA graph could repeat.
    is_first: whether the log gets lines about this. It does although these may be defaults: the config cannot tell.
    """
    if model.encoder is None:
        return config
    length = config.max_model_len or model.max_position_embeddings
    num_tokens = max(length, config.max_num_batched_tokens)
    if num_tokens > config.max_num_batched_tokens and is_first:
        _logger.info(
            "a step may have %d tokens in place of %d: this model needs all tokens of a prompt in one step; "
            "--max-model-len limits them",
            num_tokens,
            config.max_num_batched_tokens,
        )
    if (off := _switched_off(config)) and is_first:
        _logger.info("this model has no use for %s: its tokens see those behind them", " and ".join(off))
    return replace(
        config, max_num_batched_tokens=num_tokens, enable_prefix_caching=False, swap_space=0, enforce_eager=True
    )


def _switched_off(config: EngineConfig) -> list[str]:
    """Return, in words, what a resolved config has on and an encoder cannot use."""
    has_graphs = config.device.startswith("cuda") and not config.enforce_eager
    return ["prefix caching"] * config.enable_prefix_caching + ["CUDA graphs"] * has_graphs


def sees_images_whole(config: ModelConfig) -> bool:
    """Return whether a layer lets the tokens of an image see each other."""
    kinds = (layer.attention for layer in config.layers)
    return any(isinstance(attention, AttentionConfig) and attention.sees_images_whole for attention in kinds)


def max_image_tokens(config: EngineConfig, model: ModelConfig) -> int:
    """Return the tokens of the largest image, if a step must compute all of an image; 0: it may compute a part.

    Those ahead of it that see it count, too. config: has the pixels of the largest image, if the model reads any.
    Raises ConfigError if a step is too small.
    """
    if model.vision is None or config.max_image_pixels is None or not sees_images_whole(model):
        return 0
    fixed = model.vision.fixed_tokens + model.vision.num_leading
    most = fixed or config.max_image_pixels // model.vision.side**2
    if most > config.max_num_batched_tokens:
        raise ConfigError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens} is too small: this model needs all tokens of an "
            f"image in one step, and the largest image has {most}\n"
            f"  give at least {most}, or --language-model-only if no request has images"
        )
    return most
