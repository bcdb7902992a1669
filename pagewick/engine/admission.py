"""Checks whether a request can ever be served: in the HTTP process before its first byte, and again in the engine."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain

from msgspec import structs

from pagewick.engine.messages import EngineRequest, ImageInput
from pagewick.engine.model_info import ModelInfo
from pagewick.engine.scheduling.beam_search import num_candidates
from pagewick.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from pagewick.images.settings import MAX_PICTURES
from pagewick.models.vision.shrinking import shrunk

# A beam search reports all its tokens at once, at its end. In a message a log-probability takes up to 15 bytes and a
# token 28; in memory they take ten times as much.
MAX_BEAM_RESULTS = 2**20
# The extra keys that a block of the prompt overlaps become part of its name.
MAX_EXTRA_KEYS = 1024
MAX_EXTRA_KEY_BYTES = 1024
MAX_POSITION = 2**31 - 1


def writes_text(info: ModelInfo) -> bool:
    """Return whether a model writes texts, and does not make embeddings or rate texts instead."""
    return not info.embedding and not info.num_labels


def check_writes_text(info: ModelInfo) -> None:
    """Raise UnsupportedError if the model writes no text, before anything else is said about a request for some."""
    if info.embedding:
        raise UnsupportedError("this model makes embeddings and writes no text; send POST /v1/embeddings, or use embed")
    if info.num_labels:
        usual = "/v1/rerank, or use score" if info.label_activation else "/v1/classify, or use classify"
        raise UnsupportedError(f"this model rates texts and writes none; send POST {usual}")


def check_request(request: EngineRequest, info: ModelInfo) -> None:
    """Check a request against the loaded model.

    Raises InvalidRequestError for an empty prompt, unknown token ids or adapters, extra keys without tokens, images
    without their placeholders or a beam search whose result would be too large, ContextLengthError for a request that
    does not fit the context, and UnsupportedError for text of an embedding model or of a reranker, images for a model
    that reads none, or labels that the model lacks.
    """
    num_prompt_tokens = len(request.prompt_token_ids)
    if num_prompt_tokens == 0:
        raise InvalidRequestError("the prompt is empty; it needs at least one token", param="prompt")
    if not request.pooling:
        check_writes_text(info)
    if request.pooling == "score" and bool(request.label_ids) == bool(info.num_labels):
        has = "has labels of its own" if info.num_labels else "has no labels, so that the request must name tokens"
        raise UnsupportedError(f"this model {has}; see docs/reranking.md")
    _check_vocabulary(request, info.vocab_size)
    max_tokens = request.params.max_tokens
    num_output_tokens = 1 if max_tokens is None or request.options.lowers_max_tokens else max_tokens
    if num_prompt_tokens + num_output_tokens > info.max_model_len:
        limit = f"This model's maximum context length is {info.max_model_len} tokens."
        if request.pooling:
            message = f"{limit} However, the prompt has {num_prompt_tokens}. Shorten it, or set truncate_prompt_tokens."
            raise ContextLengthError(message, param="prompt")
        if num_prompt_tokens >= info.max_model_len:
            message = f"{limit} However, the prompt has {num_prompt_tokens}, which leaves no room for a response."
            raise ContextLengthError(f"{message} Shorten the prompt.", param="messages")
        raise ContextLengthError(
            f"{limit} However, you requested {num_prompt_tokens + num_output_tokens} tokens ({num_prompt_tokens} in "
            f"the prompt, {num_output_tokens} in the completion). Shorten the prompt or lower max_tokens.",
            param="max_tokens",
        )
    if request.adapter and request.adapter not in info.adapters:
        known = ", ".join(info.adapters) or "none"
        raise InvalidRequestError(f"there is no adapter {request.adapter!r}; loaded: {known}", param="model")
    _check_extra_keys(request)
    _check_images(request, info)
    if request.params.use_beam_search:
        _check_beam_search(request, info)


def _check_vocabulary(request: EngineRequest, vocab_size: int) -> None:
    allowed = request.params.allowed_token_ids or ()
    if len(allowed) > vocab_size:
        raise InvalidRequestError(
            f"allowed_token_ids names {len(allowed)} tokens and the vocabulary has {vocab_size}",
            param="allowed_token_ids",
        )
    for name, token_ids in _token_ids(request):
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
            raise InvalidRequestError(f"token id {wrong} is not in the vocabulary of {vocab_size} tokens", param=name)
    if (num_bytes := len(request.dry_breaker_mask)) not in (0, -(-vocab_size // 8)):
        raise InvalidRequestError(
            f"dry_breaker_mask has {num_bytes} bytes; it needs one bit for each of {vocab_size} tokens",
            param="dry_sequence_breakers",
        )


def _check_extra_keys(request: EngineRequest) -> None:
    if len(request.extra_keys) > MAX_EXTRA_KEYS:
        raise InvalidRequestError(
            f"extra_keys has {len(request.extra_keys)} ranges; give at most {MAX_EXTRA_KEYS}", param="extra_keys"
        )
    num_prompt_tokens = len(request.prompt_token_ids)
    for start, end, key in request.extra_keys:
        if not 0 <= start < min(end, num_prompt_tokens) or end > MAX_POSITION:
            raise InvalidRequestError(
                f"the range [{start}, {end}) of extra_keys must begin inside the prompt of {num_prompt_tokens} tokens "
                f"and end behind its begin, at most at {MAX_POSITION}",
                param="extra_keys",
            )
        if not 0 < len(key) <= MAX_EXTRA_KEY_BYTES:
            raise InvalidRequestError(
                f"a key of extra_keys has {len(key)} bytes; it needs 1 to {MAX_EXTRA_KEY_BYTES}: give a digest",
                param="extra_keys",
            )


def _check_images(request: EngineRequest, info: ModelInfo) -> None:
    """Raise unless the model reads images, and each stands where the prompt has its placeholder tokens, in order."""
    if info.writes_captions:
        _check_caption(request, info.image_fixed_tokens)
    if not request.images:
        return
    if info.image_token_id is None:
        raise UnsupportedError("this model reads no images; leave them out", param="messages")
    if len(request.images) > MAX_PICTURES:
        message = f"the prompt has {len(request.images)} images and tiles; give at most {MAX_PICTURES}"
        raise InvalidRequestError(message, param="messages")
    if info.image_num_leading and [image.start for image in request.images] != [info.image_num_leading]:
        message = f"this model reads one image, whose tokens begin at position {info.image_num_leading} of the prompt"
        raise InvalidRequestError(message, param="messages")
    end = 0
    for number, image in enumerate(request.images):
        if not _is_whole(image, info):
            rows = " and one behind each row of squares" if info.has_row_breaks else ""
            side, step = info.image_side, info.image_step or info.image_side
            square = "square of this side" if step == side else f"whole square of {side} x {side}"
            counted = (
                f"a token for each {square}{rows}"
                if not info.image_fixed_tokens
                else f"{info.image_fixed_tokens} tokens"
            )
            message = (
                f"image {number + 1} of {image.height} x {image.width} pixels has {image.num_tokens} tokens and "
                f"{len(image.pixels)} bytes; it needs sides that are multiples of {step}, {counted}, and 3 bytes for "
                "each pixel"
            )
            raise InvalidRequestError(message, param="messages")
        if image.start < end or not _has_placeholders(image, request.prompt_token_ids, info.image_token_id):
            rows = f", in rows of {image.row_length} with another token behind each" if image.row_length else ""
            message = (
                f"image {number + 1} needs {image.num_tokens} tokens {info.image_token_id} from position {image.start} "
                f"on{rows}, behind those of the image before it"
            )
            raise InvalidRequestError(message, param="messages")
        if 0 < info.max_image_tokens < image.num_tokens:
            limit = info.max_image_tokens
            message = f"image {number + 1} has {image.num_tokens} tokens; this model takes at most {limit} of an image"
            raise InvalidRequestError(message, param="messages")
        end = image.end


def _check_caption(request: EngineRequest, image_tokens: int) -> None:
    """Raise unless the prompt is that of a caption: one image, and a text behind it."""
    if len(request.images) != 1:
        message = (
            f"this model writes a caption of one image, and the request has {len(request.images)}; send one, and "
            "behind it the beginning of the caption or nothing"
        )
        raise InvalidRequestError(message, param="messages")
    prompt = request.prompt_token_ids
    if request.images[0].start or len(prompt) == image_tokens or prompt[0] in prompt[image_tokens:]:
        message = "the prompt of a caption has the tokens of an image first, and then those of a text"
        raise InvalidRequestError(message, param="messages")
    if request.params.prompt_logprobs is not None:
        message = "this model predicts no tokens of images, so that prompts have no log-probabilities; leave them out"
        raise UnsupportedError(message, param="prompt_logprobs")


def _is_whole(image: ImageInput, info: ModelInfo) -> bool:
    if info.image_sizes:
        is_plain = image.edges is None and not image.has_end and not image.row_length
        has_pixels = len(image.pixels) == 3 * image.height * image.width
        is_known = (image.height, image.width) in info.image_sizes
        return is_plain and has_pixels and is_known and image.num_tokens == info.image_fixed_tokens
    if image.edges is not None:
        return _is_joined(image, image.edges, info)
    if image.has_end:
        if info.image_most_tiles is None:
            return False
        return _is_whole(structs.replace(image, num_tokens=image.num_tokens - 1, has_end=False), info)
    rows, columns = image.height // info.image_side, image.width // info.image_side
    step = info.image_step or info.image_side
    is_divided = rows > 0 and columns > 0 and not image.height % step and not image.width % step
    has_pixels = len(image.pixels) == 3 * image.height * image.width
    if info.image_fixed_tokens:
        return is_divided and has_pixels and not image.row_length and image.num_tokens == info.image_fixed_tokens
    is_in_rows = image.row_length == (columns if info.has_row_breaks else 0)
    num_tokens = rows * (columns + info.has_row_breaks)
    return is_divided and is_in_rows and has_pixels and image.num_tokens == num_tokens


def _is_joined(image: ImageInput, edges: tuple[int, int], info: ModelInfo) -> bool:
    """Return whether a picture consists of whole tiles, and has the tokens of the rows within its edges."""
    if (
        (tile := info.image_tile) is None
        or image.has_end
        or image.height % tile
        or image.width % tile
        or min(edges) < 0
        or image.row_length
    ):
        return False
    of_tile = tile // info.image_side
    rows, columns = (
        length // tile * of_tile - 2 * edge for length, edge in zip((image.height, image.width), edges, strict=True)
    )
    has_pixels = len(image.pixels) == 3 * image.height * image.width
    if rows <= 0 or columns < 0 or not has_pixels:
        return False
    rows, columns = shrunk(rows, columns, of_tile, info.image_most_tiles)
    return image.num_tokens == rows * (columns + 1)


def _has_placeholders(image: ImageInput, prompt: list[int], token_id: int) -> bool:
    """Return whether the prompt has the placeholders of a whole image, and no others between its rows."""
    num_placeholders = 0
    for start, end in image.runs():
        if prompt[start:end] != [token_id] * (end - start):
            return False
        num_placeholders += end - start
    return image.end <= len(prompt) and prompt[image.start : image.end].count(token_id) == num_placeholders


def _check_beam_search(request: EngineRequest, info: ModelInfo) -> None:
    params = request.params
    num_stop_tokens = len({*params.stop_token_ids, *(() if params.ignore_eos else info.eos_token_ids)})
    if num_candidates(params.n, num_stop_tokens) > info.vocab_size:
        raise InvalidRequestError(
            f"a beam search of width {params.n} with {num_stop_tokens} stop tokens needs a larger vocabulary than "
            f"{info.vocab_size}; lower n",
            param="n",
        )
    room = info.max_model_len - len(request.prompt_token_ids)
    num_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    num_per_token = 1 + (params.logprobs or 0)
    num_results = params.n * num_tokens * num_per_token
    if num_results > MAX_BEAM_RESULTS:
        raise InvalidRequestError(
            f"a beam search may have at most {MAX_BEAM_RESULTS} results, n * max_tokens * (1 + logprobs); this one has "
            f"{params.n} * {num_tokens} * {num_per_token} = {num_results}. Set max_tokens to at most "
            f"{MAX_BEAM_RESULTS // (params.n * num_per_token)}, or lower n or logprobs.",
            param="max_tokens",
        )


def _token_ids(request: EngineRequest) -> Iterator[tuple[str, Collection[int]]]:
    """Yield every field of a request that has token ids, with its name."""
    params = request.params
    yield "prompt", request.prompt_token_ids
    yield "stop_token_ids", params.stop_token_ids
    yield "allowed_token_ids", params.allowed_token_ids or ()
    yield "logit_bias", params.logit_bias or ()
    yield "bad_words", list(chain.from_iterable(request.bad_word_ids))
    yield "dry_sequence_breakers", list(chain.from_iterable(request.dry_breaker_ids))
    yield "opening_ids", request.opening_ids
    yield "label_ids", request.label_ids
