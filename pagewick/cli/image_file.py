"""Image files on the command line, as parts of a message in OpenAI's form."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from pagewick.errors import ConfigError
from pagewick.images.headers import FORMAT_NAMES, format_of

# Far above any photo; the file is in memory several times on its way to the model.
MAX_BYTES = 64 * 2**20


def image_part(path: str | Path) -> dict[str, Any]:
    """Return the part of a message that shows the image in a file. Raises ConfigError if it is none."""
    path = Path(path)
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except RuntimeError:
        raise ConfigError(f"{path}: there is no such home directory; write the absolute path") from None
    except ValueError:
        raise ConfigError("the name of a file cannot contain the character U+0000") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_BYTES // 2**20} MiB; scale the image down first")
    kind = format_of(data)
    if kind is None:
        raise ConfigError(f"{path} is not an image: it must be a file of the format {FORMAT_NAMES}")
    address = f"data:{kind.media_type};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": address}}


def with_images(text: str, images: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the content of a message. Images come before the text, as the models were trained."""
    return [*images, {"type": "text", "text": text}] if images else text
