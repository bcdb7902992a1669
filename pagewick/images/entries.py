"""Entries of the JSON files that say how a model reads images, with errors that name the file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pagewick.errors import ModelLoadError

FIX = "download the model again"
# Pillow's numbers of its filters, which files hold.
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
# Values of entries that a file leaves out: those of Qwen2-VL's and Pixtral's processors in transformers.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_MAX_FILE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Entries:
    """The entries of a file, with errors that name it. An entry that is null counts as missing."""

    values: Mapping[str, Any]
    source: str

    def child(self, name: str) -> Entries:
        """Return the entries of an object within the file; none if it is missing."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise ModelLoadError(f"{name} in {self.source} is not an object; {FIX}")
        return Entries(value or {}, f"{name} in {self.source}")

    def demand_one_of(self, name: str, allowed: tuple[Any, ...]) -> None:
        """Refuse a value that would change the result."""
        if (value := self.values.get(name)) is not None and value not in allowed:
            known = ", ".join(map(repr, allowed))
            raise ModelLoadError(f"{name} in {self.source} is {str(value)[:80]!r}; Pagewick knows {known} only")

    def demand_usual_steps(self, *, resample: tuple[int, ...] = (BICUBIC,)) -> None:
        """Refuse other steps than those of all families. resample: the filters that are known."""
        self.demand_one_of("resample", resample)
        for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            self.demand_one_of(name, (True,))

    def square(self, name: str, default: int) -> int:
        """Return a number that may be written as height and width, or as a list of both."""
        value = self.values.get(name)
        if isinstance(value, list) and len(value) == 2:
            value = {"height": value[0], "width": value[1]}
        if not isinstance(value, dict):
            return self.counted(value, name, default)
        height, width = (self.counted(value.get(side), f"{name}.{side}", default) for side in ("height", "width"))
        if height != width:
            raise ModelLoadError(f"{name} in {self.source} is {height} x {width}; Pagewick knows squares only")
        return height

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise ModelLoadError(f"{name} in {self.source} must be true or false; got {str(value)[:80]!r}; {FIX}")
        return default if value is None else value

    def text(self, name: str, default: str) -> str:
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise ModelLoadError(f"{name} in {self.source} must be a text; got {str(value)[:80]!r}; {FIX}")
        return value or default

    def token(self, name: str, default: str) -> str:
        """Return the text of a token, which may be written as an object with its content."""
        value = self.values.get(name)
        text = value.get("content") if isinstance(value, dict) else default if value is None else value
        if not isinstance(text, str) or not text:
            raise ModelLoadError(f"{name} in {self.source} must be the text of a token; {FIX}")
        return text

    def count(self, name: str, default: int) -> int:
        return self.counted(self.values.get(name), name, default)

    def whole(self, name: str, default: int) -> int:
        """Return a whole number from 0."""
        value = self.values.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise ModelLoadError(f"{name} in {self.source} must be a whole number; got {str(value)[:80]!r}; {FIX}")
        return default if value is None else value

    def factor(self, name: str, default: float) -> float:
        value = self.values.get(name)
        return default if value is None else self._number(value, name)

    def channels(
        self, name: str, default: tuple[float, float, float], *, is_divisor: bool = False
    ) -> tuple[float, float, float]:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, list) or len(value) != 3:
            raise ModelLoadError(f"{name} in {self.source} must be three numbers; {FIX}")
        red, green, blue = (self._number(one, name) for one in value)
        if is_divisor and not (red and green and blue):
            raise ModelLoadError(f"{name} in {self.source} must not be 0; {FIX}")
        return red, green, blue

    def counted(self, value: Any, name: str, default: int) -> int:
        """Return a value of the file as a whole number from 1; the default if it is None. name: what errors call it."""
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise ModelLoadError(
                f"{name} in {self.source} must be a whole number from 1; got {str(value)[:80]!r}; {FIX}"
            )
        return value

    def _number(self, value: Any, name: str) -> float:
        # A comparison, because a whole number may be too large to become a float.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= sys.float_info.max:
            raise ModelLoadError(f"{name} in {self.source} must be a number; got {str(value)[:80]!r}; {FIX}")
        return float(value)


class SettingsFiles(NamedTuple):
    """The files of a model that say how it reads images.

    image: preprocessor_config.json, or image_processor in processor_config.json. processor: processor_config.json.
    config: config.json.
    """

    image: Entries
    processor: Entries
    config: Entries


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if there is no such file. Raises ModelLoadError."""
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
        if len(raw) > _MAX_FILE_BYTES:
            raise ModelLoadError(f"{path} is larger than {_MAX_FILE_BYTES} bytes; {FIX}")
        value = msgspec.json.decode(raw)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}; {FIX}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} is not an object; {FIX}")
    return value
