"""truncate_prompt_tokens: how many tokens of a prompt a request keeps."""

from __future__ import annotations

from pagewick.errors import InvalidRequestError


def tokens_to_keep(truncate_prompt_tokens: object, most: int) -> int | None:
    """Return the number of tokens to keep, or None if a prompt that is too long is refused instead.

    most: as many as fit, for which -1 stands. Raises InvalidRequestError.
    """
    wanted = truncate_prompt_tokens
    if wanted is None:
        return None
    if not isinstance(wanted, int) or isinstance(wanted, bool) or (wanted < 1 and wanted != -1):
        message = f"truncate_prompt_tokens must be 1 or more, or -1 for as many as fit; got {wanted!r}"
        raise InvalidRequestError(message, param="truncate_prompt_tokens")
    return wanted if wanted > 0 else max(1, most)
