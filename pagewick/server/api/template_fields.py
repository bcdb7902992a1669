"""The fields of a request that say how its conversation becomes a prompt; their names are vLLM's."""

from __future__ import annotations

from typing import Any, Protocol

from pagewick.server.core.request import Template


class TemplateRequest(Protocol):
    """Those of thinking are read by `thinking_of`."""

    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    documents: list[dict[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


def template_of(request: TemplateRequest) -> Template:
    return Template(
        source=request.chat_template,
        variables=request.chat_template_kwargs or {},
        documents=request.documents,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
    )
