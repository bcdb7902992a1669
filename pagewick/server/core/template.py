"""Turns a request's wishes about its prompt into arguments of AsyncEngine."""

from __future__ import annotations

from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.server.core.request import Template, Thinking
from pagewick.server.core.thinking import thinking_variables
from pagewick.server.settings import ServerSettings
from pagewick.text.prompts import ChatOptions


def chat_options(template: Template, thinking: Thinking, settings: ServerSettings) -> ChatOptions:
    """Return the keyword arguments that `render_chat` and `encode_chat` have in common.

    A prompt that continues the last message gets no generation prompt.
    Raises UnsupportedError for a template of the client's own, unless the server trusts it, and InvalidRequestError for
    contradictions.
    """
    if template.source is not None and not settings.trust_request_chat_template:
        message = (
            "this server does not run chat templates of requests; leave out chat_template, "
            "or start the server with --trust-request-chat-template"
        )
        raise UnsupportedError(message, param="chat_template")
    is_continued = template.continue_final_message
    if is_continued and template.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt contradict each other; give one of them"
        raise InvalidRequestError(message, param="continue_final_message")
    return {
        "add_generation_prompt": not is_continued and template.add_generation_prompt is not False,
        "continue_final_message": is_continued,
        "chat_template": template.source,
        "chat_template_kwargs": thinking_variables(thinking, settings) | dict(template.variables),
        "documents": template.documents,
    }
