"""The client's names for fields in errors, where they differ from those of the core."""

from __future__ import annotations

import re
from collections.abc import Mapping

# A client's own words stand between quotes, and stay as they are.
_BEFORE, _AFTER = r"(?<![\w.'\"-])", r"(?![\w'\"-])"


def renamed(text: str, names: Mapping[str, str]) -> str:
    """Return a field's name, or a message, with the client's names.

    names: see TextRequest.names. `[]` in them stands for any index: "tools[].function": "functions[]". A name may also
    have an index of its own: "messages[1]": "input[0]".
    """
    if not names:
        return text
    # The longest name that fits counts.
    patterns = [re.escape(name).replace(r"\[\]", r"\[(\d+)\]") for name in sorted(names, key=len, reverse=True)]

    def name_of(match: re.Match[str]) -> str:
        if match[0] in names:
            return names[match[0]]
        place = next((group for group in match.groups() if group is not None), "")
        found = re.sub(r"\[\d+\]", "[]", match[0])
        return names[found].replace("[]", f"[{place}]")

    return re.sub(f"{_BEFORE}(?:{'|'.join(patterns)}){_AFTER}", name_of, text)
