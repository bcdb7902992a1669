"""docs/coming-from.md: every flag in its tables does what the table says, and the command line knows no others."""

from __future__ import annotations

import re
from dataclasses import dataclass

import click
import pytest

from pagewick.cli import cli
from pagewick.cli.arguments import SAMPLING_ALIASES, SAMPLING_SHORT_FLAGS
from pagewick.cli.foreign_flags import ForeignOption
from pagewick.other_names import ALIASES
from pagewick.other_names import SHORT_FLAGS as ENGINE_SHORT_FLAGS
from pagewick.server.settings import ALIASES as SERVER_ALIASES
from pagewick.server.settings import SHORT_FLAGS as SERVER_SHORT_FLAGS
from tests.architecture.source import ROOT

DOCUMENT = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
SHORT_FLAGS = {
    short: name
    for table in (ENGINE_SHORT_FLAGS, SERVER_SHORT_FLAGS, SAMPLING_SHORT_FLAGS)
    for name in table
    for short in table[name]
}
TARGETS = {name: target for name, (target, _) in {**ALIASES, **SERVER_ALIASES, **SAMPLING_ALIASES}.items()}


@dataclass(frozen=True)
class Claim:
    """A flag of another program, how the document says one of our commands treats it, and its last column."""

    command: str
    flag: str
    fate: str
    text: str


def read_claims(document: str) -> list[Claim]:
    """Read the rows of the tables whose head begins with `flag`; the heading above names their command."""
    claims: list[Claim] = []
    for section in document.split("\n## ")[1:]:
        heading, _, rest = section.partition("\n")
        for row in rest.partition("| flag |")[2].splitlines()[2:]:
            if row.startswith("|"):
                flags, fate, text = (cell.strip() for cell in row.strip("|").split(" | "))
                command = re.findall(r"`(\w+)`", heading)[0]
                claims += [Claim(command, flag, fate, text) for flag in re.findall(r"`([^`]+)`", flags)]
    return claims


CLAIMS = read_claims(DOCUMENT)


def options_of(command: str) -> dict[str, click.Parameter]:
    found = cli.get_command(click.Context(cli), command)
    assert found is not None
    return {flag: option for option in found.params for flag in (*option.opts, *option.secondary_opts)}


def fate_of_foreign(flag: ForeignOption) -> str:
    if flag.harmless:
        return "by value"
    if not flag.foreign.is_refused:
        return "no effect"
    return "not yet" if " yet" in flag.sentence else "another way"


def target_of(flag: str) -> str:
    """Return our flag for another name."""
    name = SHORT_FLAGS.get(flag) or flag.removeprefix("--").replace("-", "_")
    return "--" + TARGETS[name if name in TARGETS else name.removeprefix("no_")].replace("_", "-")


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.command} {claim.flag}")
def test_the_document_is_true(claim: Claim) -> None:
    option = options_of(claim.command)[claim.flag]
    assert isinstance(option, click.Option)
    if isinstance(option, ForeignOption):
        assert claim.fate == fate_of_foreign(option)
        assert option.sentence in claim.text
        if option.harmless:
            assert claim.text.startswith(f"{', '.join(option.harmless)}: accepted; otherwise refused: ")
    elif option.hidden:
        assert claim.fate == "understood"
        assert f"`{target_of(claim.flag)}`" in claim.text
    else:
        assert claim.fate == "same"


def test_every_name_that_is_understood_is_documented() -> None:
    documented = {(claim.command, claim.flag) for claim in CLAIMS}
    for command in ("serve", "complete"):
        hidden = {
            (command, flag)
            for option in options_of(command).values()
            if isinstance(option, click.Option) and option.hidden
            for flag in option.opts
        }
        # A flag that all commands have is documented under serve only.
        assert {flag for _, flag in hidden} <= {flag for _, flag in documented}


def test_the_document_says_one_thing_about_each_flag() -> None:
    fates = {(claim.command, claim.flag, claim.fate) for claim in CLAIMS}
    assert len(fates) == len({(command, flag) for command, flag, _ in fates}) > 150
