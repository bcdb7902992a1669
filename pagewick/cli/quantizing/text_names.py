"""Names of tensors in checkpoints of models that also see images, as those of their text parts by themselves."""

from __future__ import annotations

import re
from typing import Final

# Names in the first files of GPT-2, which are shorter than those in others.
_BARE_GPT2: Final = re.compile(r"(wte|wpe|h|ln_f)\.")
# The text part stands one level down.
TEXT_PART: Final = re.compile(
    r"(model\.language_model|model\.text_model|language_model\.model)\.|language_model\.(?=lm_head)"
)


def text_name(name: str) -> str:
    """Return the name that a tensor has in the text part by itself; any other name as it is."""
    if _BARE_GPT2.match(name):
        return f"transformer.{name}"
    return TEXT_PART.sub(lambda match: "" if match[0] == "language_model." else "model.", name, count=1)
