"""What a request says about how its conversation becomes a prompt, as AsyncEngine takes it."""

from __future__ import annotations

from typing import Any, Protocol

from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.server.api.thinking import ThinkingRequest, template_variables
from pagewick.server.settings import ServerSettings


class TemplateRequest(ThinkingRequest, Protocol):
    """The fields that are looked at."""

    chat_template: str | None
    documents: list[dict[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


def template_arguments(request: TemplateRequest, settings: ServerSettings) -> dict[str, Any]:
    """The keyword arguments that `render_chat` and `encode_chat` have in common.

    A prompt that goes on from the last message ends in it, so that no generation prompt is added.
    Raises UnsupportedError for a template of the client's own, unless the server trusts it, and InvalidRequestError for
    contradictions.
    """
    if request.chat_template is not None and not settings.trust_request_chat_template:
        message = (
            "this server does not run chat templates of requests; leave out chat_template, "
            "or start the server with --trust-request-chat-template"
        )
        raise UnsupportedError(message, param="chat_template")
    is_continued = bool(request.continue_final_message)
    if is_continued and request.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt contradict each other; give one of them"
        raise InvalidRequestError(message, param="continue_final_message")
    return {
        "add_generation_prompt": not is_continued and request.add_generation_prompt is not False,
        "continue_final_message": is_continued,
        "chat_template": request.chat_template,
        "chat_template_kwargs": template_variables(request, settings),
        "documents": request.documents,
    }
