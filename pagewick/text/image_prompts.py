"""ImageReader: puts the images of a request into the places that its prompt has for them.

A prompt has one placeholder token for each image. It is repeated as often as the image has tokens, in some models with
another token behind each row of them. Some models get several pictures of an image, tiles and the whole; the tokens of
each picture follow a text that names it. All of this follows from the size in the file's header alone: nothing is
decoded for a prompt that is too long.

Templates of some models write another token instead. A text then stands in its place, with the placeholder token in it.
This comes before the prompt becomes tokens, because the ends of that text may form tokens with what is around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Self

from pagewick.engine.messages import ImageInput
from pagewick.errors import ContextLengthError, InvalidRequestError, ModelLoadError
from pagewick.images.settings import MAX_IMAGES, MAX_PICTURES, ImageSettings, View
from pagewick.images.sources import ImageSource, LoadedImage, load

if TYPE_CHECKING:
    from pagewick.images.decoding import Picture

# The field of a prompt with images, in vLLM's words.
MULTI_MODAL_DATA = "multi_modal_data"
# Limits of one request.
# Pixels of the files: about as many seconds of a processor's time as this is times 2**26.
MAX_FILE_PIXELS = 2**28
# Pixels of the resized images, which take three bytes each in the message to the engine.
MAX_RESIZED_PIXELS = 2**26


class ModelInput(NamedTuple):
    """The tokens of a prompt, and the images that its placeholders stand for: each tile of an image is one."""

    token_ids: list[int]
    images: Sequence[ImageInput] = ()

    @property
    def short_token_ids(self) -> list[int]:
        """The token ids with one placeholder for each picture, for people who read the prompt."""
        short, end = [], 0
        for one in self.images:
            short += self.token_ids[end : one.start + 1]
            end = one.start + one.num_tokens
        return short + self.token_ids[end:]


class PlacedPicture(NamedTuple):
    """A picture of an image, whose `num_tokens` tokens begin `offset` tokens behind the image's first one.

    row_length: as in ImageInput.
    """

    offset: int
    num_tokens: int
    row_length: int


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image that is not decoded yet.

    number: its place in the request, from 1. token_ids: all of its tokens, with those between and around its pictures.
    settings: those for all images of its request.
    start: the position of the first one in the prompt.
    """

    number: int
    image: LoadedImage
    token_ids: Sequence[int]
    pictures: Sequence[PlacedPicture]
    settings: ImageSettings
    start: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class PromptTokens(NamedTuple):
    """A prompt's token ids, with all tokens of all images."""

    token_ids: list[int]
    images: Sequence[PlacedImage] = ()


class ImageReader:
    """Reads the images of one model's requests; may be used by several threads at once.

    settings: how the model wants its images. token_id: the placeholder token. token: its text. row_ends: the tokens
    behind each row of placeholders but the last one, and behind that, if the settings name some. encode: returns the
    tokens of the texts that the settings put around pictures; None if they put none there.
    """

    def __init__(
        self,
        settings: ImageSettings,
        token_id: int,
        token: str | None = None,
        *,
        row_ends: tuple[int, int] | None = None,
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        assert (row_ends is None) == (settings.row_break == 0), "the settings say whether rows are parted"
        assert token is not None or settings.placeholder is None, "the text around an image has its token in it"
        self._settings = settings
        self._token_id = token_id
        self._token = token or f"token {token_id}"
        self._row_ends = row_ends
        self._encode = encode
        self._written = None if (other := settings.placeholder) is None else other.written
        self._text = "" if other is None else other.around(self._token)

    @classmethod
    def of(
        cls,
        settings: ImageSettings,
        token_id: int,
        token: str | None = None,
        *,
        id_of: Callable[[str], int | None] = lambda text: None,
        encode: Callable[[str], list[int]] | None = None,
    ) -> Self:
        """Return the reader of a model with these settings. id_of: finds the token with a text. encode: see above.

        Raises ModelLoadError if the tokenizer lacks a token that the settings name.
        """
        row_ends = None
        if settings.row_break:
            ends = settings.row_end, settings.image_end
            row_ends = _known(ends[0], id_of, "parts the rows"), _known(ends[1], id_of, "parts the rows")
        for text in (*settings.marks, *(() if settings.placeholder is None else settings.placeholder.tokens)):
            _known(text, id_of, "marks the places")
        if settings.marks and id_of(token or "") != token_id:
            # The texts around pictures have this token in them, and become tokens together.
            raise ModelLoadError(
                f"the tokenizer does not know the image token {token_id} ({token}) by its text\n"
                "  download the tokenizer again, or leave images out with --language-model-only"
            )
        return cls(settings, token_id, token, row_ends=row_ends, encode=encode)

    def written_out(self, pieces: Sequence[str]) -> Sequence[str]:
        """Return the pieces of a prompt with images as the model reads them.

        A token that templates write for an image is replaced, if it is not the placeholder token itself. The same words
        in a user's message span two pieces (pagewick/text/chat_template.py), and stay.
        """
        return pieces if self._written is None else [one.replace(self._written, self._text) for one in pieces]

    def loaded(self, sources: Sequence[ImageSource], *, max_len: int, param: str) -> list[PlacedImage]:
        """Return the images with their numbers of tokens; they have no places yet.

        max_len: the model's context length. param: the field with the images.
        Raises InvalidRequestError for an image that cannot be read, for too many or too large ones, and
        ContextLengthError if they cannot fit the context.
        """
        if len(sources) > MAX_IMAGES:
            message = f"a request may have at most {MAX_IMAGES} images; it has {len(sources)}"
            raise InvalidRequestError(message, param=param)
        if self._settings.only_place is not None and len(sources) > 1:
            message = f"this model reads one image of a request, and this one has {len(sources)}; send one"
            raise InvalidRequestError(message, param=param)
        images: list[PlacedImage] = []
        settings = self._settings.for_images(len(sources))
        num_file_pixels = num_pixels = 0
        for number, source in enumerate(sources, start=1):
            with _naming(number, param):
                image = load(source)
                size = image.upright() if settings.depends_on_turning else (image.height, image.width)
                views = settings.views(*size)
                images.append(self._placed(number, image, views, settings))
            num_file_pixels += image.height * image.width
            num_pixels += sum(view.num_pixels for view in views)
        num_tokens = sum(one.num_tokens for one in images)
        if num_tokens > max_len:
            raise ContextLengthError(
                f"This model's maximum context length is {max_len} tokens. The images alone have {num_tokens}; send "
                "fewer or smaller ones.",
                param=param,
            )
        num_pictures = sum(len(one.pictures) for one in images)
        for count, limit, what, fix in (
            (num_file_pixels, MAX_FILE_PIXELS, "pixels", "Make them smaller"),
            # Some models enlarge small images, so that only fewer help.
            (num_pixels, MAX_RESIZED_PIXELS, "pixels as the model resizes them", "Send fewer images, or smaller ones"),
            (num_pictures, MAX_PICTURES, "tiles", "Send fewer images, or smaller ones"),
        ):
            if count > limit:
                message = f"the images of a request may have at most {limit} {what}; they have {count}. {fix}"
                raise InvalidRequestError(message, param=param)
        return images

    def _placed(self, number: int, image: LoadedImage, views: Sequence[View], settings: ImageSettings) -> PlacedImage:
        """Return an image with its tokens; it has no place yet. number, settings: as in PlacedImage."""
        token_ids: list[int] = []
        pictures = []
        ahead = self._ahead(self._settings.before_image(number), views)
        for view, before in zip(views, ahead, strict=False):
            token_ids += before
            row_length = view.box.width // self._settings.token_side if self._row_ends else 0
            tokens = self._tokens(settings.tokens_in(view), row_length)
            pictures.append(PlacedPicture(len(token_ids), len(tokens), row_length))
            token_ids += tokens
        return PlacedImage(number, image, token_ids + ahead[-1], pictures, settings)

    def _ahead(self, start: str, views: Sequence[View]) -> list[list[int]]:
        """Return the tokens ahead of each view's, and those behind the last one's. start: the text ahead of all."""
        end = "" if self._row_ends else self._settings.image_end
        if not start + end and not any(view.before + view.after for view in views):
            return [[] for _ in range(len(views) + 1)]
        assert self._encode is not None, "these settings have texts around pictures"
        # All at once: neighbouring characters may form one token.
        texts = (view.before + self._token + view.after for view in views)
        token_ids = self._encode(start + "".join(texts) + end)
        places = [place for place, token_id in enumerate(token_ids) if token_id == self._token_id]
        assert len(places) == len(views), "the texts have no placeholders of their own"
        begins, ends = [0, *(place + 1 for place in places)], [*places, len(token_ids)]
        return [token_ids[begin:end] for begin, end in zip(begins, ends, strict=True)]

    def placed(
        self,
        token_ids: Sequence[int],
        images: Sequence[PlacedImage],
        *,
        max_len: int,
        num_output_tokens: int,
        param: str,
    ) -> PromptTokens:
        """Replace each placeholder by all tokens of its image. images: the result of `loaded`.

        num_output_tokens: those that must have room behind the prompt.
        Raises InvalidRequestError unless there is one placeholder for each image, and ContextLengthError.
        """
        num_places = token_ids.count(self._token_id)
        if num_places != len(images):
            message = (
                f"the prompt has {num_places} places for images ({self._place}), and the request has {len(images)} "
                "images; it needs one place for each image. Chat templates may leave out images of some roles: send "
                "images in messages of the user's"
            )
            raise InvalidRequestError(message, param=param)
        num_tokens = len(token_ids) - len(images) + sum(one.num_tokens for one in images)
        if num_tokens + num_output_tokens > max_len:
            limit = f"This model's maximum context length is {max_len} tokens."
            if num_tokens >= max_len:
                raise ContextLengthError(
                    f"{limit} However, the prompt has {num_tokens} with its images, which leaves no room for a "
                    "response. Shorten the prompt, or send fewer or smaller images.",
                    param=param,
                )
            raise ContextLengthError(
                f"{limit} However, you requested {num_tokens + num_output_tokens} tokens ({num_tokens} in the prompt "
                f"with its images, {num_output_tokens} in the completion). Shorten the prompt, send fewer "
                "or smaller images, or lower max_tokens.",
                param="max_tokens",
            )
        whole: list[int] = []
        placed: list[PlacedImage] = []
        position = 0
        for one in images:
            place = token_ids.index(self._token_id, position)
            if place != (self._settings.only_place or place):
                message = (
                    f"the place of the image ({self._token}) is token {place} of the prompt, counted from 0; this "
                    f"model needs it at {self._settings.only_place}, behind the token that begins all prompts"
                )
                raise InvalidRequestError(message, param=param)
            whole += token_ids[position:place]
            placed.append(replace(one, start=len(whole)))
            whole += one.token_ids
            position = place + 1
        whole += token_ids[position:]
        return PromptTokens(whole, placed)

    @property
    def _place(self) -> str:
        """The words that stand for an image in a prompt, for errors."""
        if self._written in (None, self._token):
            return self._token
        return f"{self._written} in a text, and {self._token} among token ids"

    def _tokens(self, num_tokens: int, row_length: int) -> list[int]:
        """Return the tokens of a picture."""
        if self._row_ends is None:
            return [self._token_id] * num_tokens
        row_end, image_end = self._row_ends
        row = [*[self._token_id] * row_length, row_end]
        return [*(row * (num_tokens // len(row)))[:-1], image_end]

    def read(self, placed: PlacedImage, *, param: str) -> list[ImageInput]:
        """Decode an image, which may take seconds, and return its pictures, each with its place in the prompt.

        param: as in `loaded`. Raises InvalidRequestError.
        """
        side = self._settings.token_side
        with _naming(placed.number, param):
            found = placed.image.pictures(placed.settings)
            rows = [picture.pixels.shape[1] // side if self._row_ends else 0 for picture in found]
            counted = [(picture.num_tokens, row_length) for picture, row_length in zip(found, rows, strict=True)]
            if counted != [(one.num_tokens, one.row_length) for one in placed.pictures]:
                raise InvalidRequestError("its size has changed while it was read; send another copy of it")
        images = []
        layout = _layout(found, placed.pictures)
        for picture, one in zip(found, placed.pictures, strict=True):
            height, width, _ = picture.pixels.shape
            start, data = placed.start + one.offset, picture.pixels.tobytes()
            rest = one.row_length, layout, picture.edges, picture.has_end
            images.append(ImageInput(start, picture.num_tokens, height, width, data, *rest))
        return images


def _layout(pictures: Sequence[Picture], places: Sequence[PlacedPicture]) -> bytes:
    """Return a name for the places and the sizes of an image's pictures; empty if there is one picture."""
    if len(pictures) < 2:
        return b""
    sizes = (one.pixels.shape[:2] for one in pictures)
    parts = [f"{place.offset}:{height}x{width}" for place, (height, width) in zip(places, sizes, strict=True)]
    return ",".join(parts).encode()


def _known(text: str, id_of: Callable[[str], int | None], purpose: str) -> int:
    if (token_id := id_of(text)) is None:
        raise ModelLoadError(
            f"the tokenizer lacks {text!r}, which {purpose} of images\n"
            "  download the tokenizer again, or leave images out with --language-model-only"
        )
    return token_id


@contextmanager
def _naming(number: int, param: str) -> Iterator[None]:
    """Let errors name the image, and the field if they have none."""
    try:
        yield
    except InvalidRequestError as error:
        error.args = (f"image {number} of the request: {error}",)
        error.param = error.param or param
        raise
