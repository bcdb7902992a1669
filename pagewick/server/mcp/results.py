"""The text that the model reads of a tool's result."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcp_types import CallToolResult


def text_of_result(result: CallToolResult) -> str:
    """Return the texts of a result, one below the other; the structured content if there is nothing else."""
    texts = []
    for block in result.content:
        match block.type:
            case "text":
                texts.append(block.text)
            case "image" | "audio":
                texts.append(f"[{block.type} of type {block.mime_type}, which is not passed on]")
            case "resource_link":
                texts.append(f"[link to {block.uri}: {block.description or block.name}]")
            case "resource":
                text = getattr(block.resource, "text", None)
                texts.append(f"[file {block.resource.uri}, which is not text]" if text is None else text)
    if not texts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(texts)
