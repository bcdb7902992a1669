"""Write the text on which `pagewick convert` calibrates: `python -m training.write_conversations`.

Most are chats such as the built-in model learns, with another seed than any training or measurement. The others have
passages as responses: of this project's documents and source, and of calibration_text.txt, which has other languages.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from training.corpus import build_documents

ROOT: Final = Path(__file__).parent.parent
OUTPUT: Final = ROOT / "pagewick/cli/converting/conversations.jsonl"
TEXT: Final = Path(__file__).with_name("calibration_text.txt")
SEED: Final = 20_261_207
NUM_CHATS: Final = 400
PASSAGE_CHARS: Final = 700
# Documents and sources that read well without the rest of the project.
FILES: Final = {
    "Explain how {} works.": ("docs/kv-cache.md", "docs/sampling.md", "docs/quantization.md", "docs/gguf.md"),
    "Continue this document: {}": ("ARCHITECTURE.md", "CONTRIBUTING.md", "docs/tool-calls.md"),
    "Show me the source of {}.": (
        "pagewick/layers/rotary.py", "pagewick/text/stop_strings.py", "pagewick/kernels/reference.py",
        "pagewick/kernels/cpu/csrc/vec.h", "pagewick/server/page/composer.js",
    ),
}  # fmt: skip


def chats() -> Iterator[dict[str, Any]]:
    for document in build_documents(NUM_CHATS, SEED):
        yield {"messages": document.messages, **({"tools": document.tools} if document.tools else {})}


def passages() -> Iterator[dict[str, Any]]:
    for request, paths in FILES.items():
        for path in paths:
            text = (ROOT / path).read_text(encoding="utf-8")
            for first in range(0, min(len(text), 4 * PASSAGE_CHARS), PASSAGE_CHARS):
                asked = {"role": "user", "content": request.format(path)}
                yield {"messages": [asked, {"role": "assistant", "content": text[first : first + PASSAGE_CHARS]}]}


def continuations() -> Iterator[dict[str, Any]]:
    """Pieces of the text: the first line or sentence of each is the request, and the rest the response."""
    piece = ""
    for paragraph in TEXT.read_text(encoding="utf-8").split("\n\n"):
        piece = f"{piece}\n\n{paragraph}".strip()
        if len(piece) >= PASSAGE_CHARS:
            start = re.match(r".*?(?:[.!?:](?= )|$)", piece, re.MULTILINE)
            assert start is not None
            asked = {"role": "user", "content": f"Continue: {start[0]}"}
            yield {"messages": [asked, {"role": "assistant", "content": piece[start.end() :].strip()}]}
            piece = ""


def main() -> None:
    found = [*chats(), *passages(), *continuations()]
    random.Random(SEED).shuffle(found)
    OUTPUT.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in found), encoding="utf-8")


if __name__ == "__main__":
    main()
