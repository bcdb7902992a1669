"""Every answer of the corpus agrees with the code: its values come from there, and every name in it exists."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container
from functools import cache
from pathlib import Path

import pytest

import pagewick
from pagewick.cli.chatting.commands import COMMANDS
from pagewick.config import HUBS, SPECULATIVE_METHODS
from pagewick.errors import ConfigError
from pagewick.kernels.cpu.binding import INSTRUCTION_SETS
from pagewick.models.registry import ARCHITECTURES
from pagewick.server.guard.access import check_exposure
from pagewick.server.guard.api_keys import ApiKeys
from pagewick.server.settings import ServerSettings
from training import known
from training.corpus.questions import UNKNOWN_ABOUT_PAGEWICK, UNKNOWN_ANSWER, UNKNOWN_FLAG, facts
from training.corpus.wording import read_toml

ANSWERS = {fact["id"]: fact["answer"] for fact in facts()}
ALL_ANSWERS = {
    **ANSWERS,
    "unknown": UNKNOWN_ANSWER,
    "unknown_about_pagewick": UNKNOWN_ABOUT_PAGEWICK,
    "unknown_flag": UNKNOWN_FLAG,
}
# Names of other programs' flags, commands and identifiers.
FOREIGN_FLAGS = {"--nproc-per-node"}
FOREIGN_IDENTIFIERS = {"base_url", "trust_remote_code"}
# Texts with a digit that no code can change: names, and arguments of example commands.
DIGITS = (
    "Qwen/Qwen3-0.6B", "Qwen3", "FP8", "AVX-512", "AVX2", "8xH200", "4-bit", "16-bit", "jinja2", "0.0.0.0",
    "HF_HUB_OFFLINE=1", "--tensor-parallel-size 2", "--nproc-per-node 2", "temperature 0", "priority in a request: 0",
    "/v1", "q4_k_m", "int8 and fp8", "0 turns it off",
)  # fmt: skip


@cache
def sources(folder: str) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted((known.ROOT / folder).rglob("*.py")))


def test_values_of_the_code_are_not_written_by_hand() -> None:
    for fact in read_toml("facts.toml")["fact"]:
        text = re.sub(r"HTTP \d{3}|\{\w+\}", "", fact["answer"])
        for literal in DIGITS:
            text = text.replace(literal, "")
        assert not re.search(r"\d", text), f"{fact['id']}: use a placeholder of training/known.py, or add to DIGITS"


def test_placeholders_are_filled_and_all_used() -> None:
    assert [name for name, answer in ALL_ANSWERS.items() if set("{}") & set(answer)] == []
    written = str(read_toml("facts.toml"))
    assert [name for name in known.values() if f"{{{name}}}" not in written] == []
    with pytest.raises(KeyError, match="colour"):
        known.fill("The {colour} is blue.")


def test_a_changed_default_changes_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "ServerSettings", lambda: ServerSettings(port=8123))
    known.values.cache_clear()
    try:
        assert known.fill("port {default_port}") == "port 8123"
    finally:
        known.values.cache_clear()


def unknown_names(pattern: str, known_names: Container[str], *, ignored: Collection[str] = ()) -> dict[str, set[str]]:
    """Answer -> the names in it that match a pattern and are not known."""
    found = {name: set(re.findall(pattern, answer)) - set(ignored) for name, answer in ALL_ANSWERS.items()}
    return {name: bad for name, names in found.items() if (bad := {word for word in names if word not in known_names})}


def test_flags_exist() -> None:
    assert unknown_names(r"(?<![\w-])--[a-z][a-z-]+", known.flags() | FOREIGN_FLAGS) == {}


def test_files_exist() -> None:
    files = r"\b(?:docs|training)/[a-z_-]+\.(?:md|py)|\b[A-Z]{4,}\.md"
    named = {file for answer in ALL_ANSWERS.values() for file in re.findall(files, answer)}
    assert unknown_names(files, {file for file in named if (known.ROOT / file).is_file()}) == {}


def test_routes_and_commands_of_the_chat_exist() -> None:
    # A path of the server stands after a space; the address of the server is http://...:8000/v1.
    served = set(re.findall(r'"(/[a-z0-9_./-]*)"', sources("pagewick/server")))
    of_the_chat = {usage.split()[0] for usage in COMMANDS}
    assert unknown_names(r"(?<= )/[a-z][a-z0-9_./-]*[a-z]", served | of_the_chat) == {}


def test_commands_and_make_targets_exist() -> None:
    commands = {name.partition(" ")[2] for name in known.commands()}
    assert unknown_names(r"\bpagewick ([a-z]+)", commands, ignored=("works", "command", "import")) == {}
    makefile = (known.ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert unknown_names(r"\bmake ([a-z]+)", targets, ignored=("has",)) == {}


def test_variables_and_identifiers_exist() -> None:
    # The name of a flag's variable is computed.
    ignored = {known.values()["port_variable"], *FOREIGN_IDENTIFIERS}
    names = r"\b[A-Z]+_[A-Z_]+\b|(?<![\w/-])[a-z]+(?:_[a-z]+)+\b"
    assert unknown_names(names, sources("pagewick"), ignored=ignored) == {}


def test_statuses_exist() -> None:
    assert unknown_names(r"HTTP (\d{3})", set(re.findall(r"\b\d{3}\b", sources("pagewick/server")))) == {}


def test_python_names_exist() -> None:
    pattern = r"\b(LLM|AsyncEngine|SamplingParams)\b(?:\.(\w+))?"
    for owner, attribute in {pair for answer in ALL_ANSWERS.values() for pair in re.findall(pattern, answer)}:
        assert hasattr(getattr(pagewick, owner), attribute or "__init__")


def test_named_families_have_an_architecture() -> None:
    families = ANSWERS["architectures"].partition(" and more run")[0].split(", ")
    assert len(families) >= 5
    assert [x for x in families if not any(name.lower().startswith(x.lower()) for name in ARCHITECTURES)] == []


def check_exposed(**settings: object) -> None:
    server = ServerSettings(host="0.0.0.0", **settings)  # type: ignore[arg-type]
    check_exposure(server, ApiKeys(server, environ={}))


def needs_a_key() -> bool:
    with pytest.raises(ConfigError, match="--insecure"):
        check_exposed()
    check_exposed(api_key=("secret-secret",))
    return True


def insecure_needs_none() -> bool:
    check_exposed(insecure=True)
    return True


CLAIMS: dict[str, Callable[[], bool]] = {
    "open_host": needs_a_key,
    "insecure": insecure_needs_none,
    "license": lambda: "Apache License" in Path(known.ROOT / "LICENSE").read_text()[:200],
    "privacy": lambda: not ServerSettings().log_prompts,
    "modelscope": lambda: "modelscope" in HUBS,
    "speculative_flags": lambda: "ngram" in SPECULATIVE_METHODS,
    "kernels": lambda: {"amx", "avx512", "avx2", "neon"} <= set(INSTRUCTION_SETS),
    "default_host": lambda: ServerSettings().host.startswith("127."),
    "chat_page": lambda: ServerSettings().ui,
    "make_serve": lambda: "serve: install" in (known.ROOT / "Makefile").read_text(),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_the_code_does_what_the_answer_says(name: str) -> None:
    assert name in ANSWERS
    assert CLAIMS[name]()
