"""ChatSettings: how responses are sampled and shown, which flags and `/set` change."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pagewick.errors import ConfigError
from pagewick.sampling_params import SamplingParams

# A chat shows one response for each message, and only its text.
_NOT_IN_A_CHAT = frozenset(
    {"n", "best_of", "logprobs", "prompt_logprobs", "use_beam_search", "length_penalty", "early_stopping"}
)
_TEXTS = ("stop", "bad_words", "dry_sequence_breakers")
_SWITCHES = ("thinking", "show_thinking")
_SWITCH_VALUES = {"on": True, "true": True, "off": False, "false": False}
SAMPLING_NAMES = tuple(one.name for one in fields(SamplingParams) if one.name not in _NOT_IN_A_CHAT)
NAMES = (*SAMPLING_NAMES, *_SWITCHES)


@dataclass(slots=True)
class ChatSettings:
    """Settings of a chat. changes: values that differ from the model's own SamplingParams.

    thinking: the chat template's enable_thinking; None leaves it to the template. show_thinking: show thoughts as they
    arrive, instead of how long they took.
    """

    changes: dict[str, Any] = field(default_factory=dict)
    thinking: bool | None = None
    show_thinking: bool = False

    @property
    def template_kwargs(self) -> dict[str, Any]:
        return {} if self.thinking is None else {"enable_thinking": self.thinking}

    @property
    def repeats_itself(self) -> bool:
        """Whether a message that is sent again must get the same response."""
        return self.changes.get("temperature") == 0 or self.changes.get("seed") is not None

    def change(self, name: str, text: str) -> None:
        """Set a value as the user typed it; "default" undoes a change. Raises ConfigError or InvalidRequestError."""
        name = name.replace("-", "_")
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1)
            raise ConfigError(
                f"there is no setting {name}; " + (f"did you mean {near[0]}?" if near else "/set lists them")
            )
        if name in _SWITCHES:
            value = _SWITCH_VALUES.get(text.lower())
            if text == "default":
                value = None if name == "thinking" else False
            elif value is None:
                raise ConfigError(f"{name} is on or off; got {text}")
            setattr(self, name, value)
        elif text == "default":
            self.changes.pop(name, None)
        else:
            changes = {**self.changes, name: _value(name, text)}
            SamplingParams(**changes)
            self.changes = changes

    def describe(self, defaults: SamplingParams | None) -> Iterator[str]:
        """Yield a line for each setting, first those that were changed. defaults: the model's, if they are known."""
        for name in sorted(SAMPLING_NAMES, key=lambda name: name not in self.changes):
            if name in self.changes:
                yield f"{name} = {_shown(self.changes[name])}  (changed)"
            elif defaults is not None:
                yield f"{name} = {_shown(getattr(defaults, name))}"
            else:
                yield f"{name} = (the server's)"
        yield f"thinking = {'(the model decides)' if self.thinking is None else _shown(self.thinking)}"
        yield f"show_thinking = {_shown(self.show_thinking)}"

    def as_request_fields(self) -> Mapping[str, Any]:
        """Return the changes as fields of a request to an OpenAI-compatible server."""
        kwargs = {"chat_template_kwargs": self.template_kwargs} if self.template_kwargs else {}
        return {**self.changes, **kwargs}


def _value(name: str, text: str) -> Any:
    """Parse a value as JSON, or take the text itself: `/set stop END` needs no quotes. Raises ConfigError."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    except RecursionError:
        raise ConfigError(f"{name}: the value is nested too deeply") from None
    except ValueError:  # Python reads no numbers of more than some thousand digits
        raise ConfigError(f"{name}: a number of {sum(map(str.isdigit, text))} digits is too long") from None
    if name in _TEXTS:
        return value if isinstance(value, list) else [value if isinstance(value, str) else text]
    return value


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return json.dumps(value, ensure_ascii=False) if value is not None else "none"
