"""Grade a model by 200 calls of the page's three example tools: `python -m tests.demo.tool_calls [MODEL]`.

The wordings were written for this and are not in the training corpus. A call counts only if its name and its arguments
are exactly those that were asked for.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import pagewick
from pagewick import LLM, SamplingParams
from pagewick.config import BUILTIN_MODEL
from pagewick.outputs import CompletionOutput

NUM_CALLS: Final = 200
SEED: Final = 4_811
CITIES: Final = (
    "Lisbon", "Nairobi", "Oslo", "Buenos Aires", "Kyoto", "Marrakesh", "Winnipeg", "Tallinn", "Quito", "Hanoi", "Perth",
    "Ljubljana", "Santiago", "Reykjavik", "Accra", "New Orleans", "Vientiane", "Graz", "Porto Alegre", "Tbilisi",
    "Bergen", "Salt Lake City", "Antwerp", "Mombasa", "Chennai", "Cork", "Bilbao", "Dunedin", "Odessa", "Suva",
)  # fmt: skip
WORDINGS: Final = {
    "get_weather": (
        "What's the weather in {city}?",
        "how's the weather looking in {city}",
        "Can you check the weather in {city} for me?",
        "please tell me what the weather is in {city}",
        "Is it cold in {city} at the moment?",
        "weather for {city} please",
        "I'm flying to {city} tomorrow, how is the weather there?",
        "I want to know the weather in {city}.",
        "Look up the weather in {city}",
        "do you know whether it is raining in {city}?",
        "{city}: what's the weather?",
    ),
    "get_time": (
        "What time is it in {city}?",
        "what's the time in {city} right now?",
        "Can you tell me the local time in {city}?",
        "time in {city} please",
        "I need the current time in {city}.",
        "please look up the time in {city}",
        "Which time do they have in {city}?",
        "how late is it now in {city}",
        "{city}, what time is it there?",
    ),
    "add": (
        "What is {a} + {b}?",
        "add {a} and {b}",
        "Please add {a} to {b}",
        "what's {a} plus {b}",
        "Calculate the sum of {a} and {b}.",
        "how much are {a} and {b} together?",
        "{a}+{b}",
        "Can you sum up {a} and {b}?",
        "I have {a} and {b}; what is the total?",
        "Use the tool to add {a} and {b}",
    ),
}


class Request(NamedTuple):
    """A message, and the call that it asks for."""

    text: str
    name: str
    arguments: dict[str, Any]


def example_tools() -> list[dict[str, Any]]:
    """Return the page's example as a list in the API's shape."""
    source = (Path(pagewick.__file__).parent / "server" / "page" / "tools.js").read_text(encoding="utf-8")
    found = re.search(r"EXAMPLE = `(.*?)`", source, re.DOTALL)
    assert found, "the page has an example"
    return [{"type": "function", "function": function} for function in json.loads(found[1])]


def requests() -> list[Request]:
    """Return the requests: each tool in turn, in random wordings with random arguments."""
    rng = random.Random(SEED)
    found = []
    for index in range(NUM_CALLS):
        name = list(WORDINGS)[index % len(WORDINGS)]
        numbers = {"a": rng.randint(0, 999), "b": rng.randint(0, 99)}
        arguments = numbers if name == "add" else {"city": rng.choice(CITIES)}
        found.append(Request(rng.choice(WORDINGS[name]).format(**arguments), name, arguments))
    return found


def calls_of(output: CompletionOutput) -> list[tuple[str, Any]] | None:
    """Return the names and arguments of a response's calls; None if it has text beside them or if JSON is broken."""
    if any(part.call is None for part in output.parts):
        return None
    try:
        return [(part.call.name, json.loads(part.text)) for part in output.parts if part.call is not None]
    except ValueError:
        return None


def main() -> None:
    """Print every call that differs, and the number of exact ones."""
    model = sys.argv[1] if len(sys.argv) > 1 else BUILTIN_MODEL
    asked = requests()
    with LLM(model) as llm:
        responses = llm.chat(
            [[{"role": "user", "content": request.text}] for request in asked],
            SamplingParams(temperature=0, max_tokens=100),
            tools=example_tools(),
            use_tqdm=False,
        )
    num_exact = 0
    for request, response in zip(asked, responses, strict=True):
        calls = calls_of(response.outputs[0])
        if calls == [(request.name, request.arguments)]:
            num_exact += 1
        else:
            print(f"{request.text}\n    {calls if calls else response.outputs[0].text!r}")
    print(f"{num_exact} of {len(asked)} calls are exact ({num_exact / len(asked):.1%})")


if __name__ == "__main__":
    main()
