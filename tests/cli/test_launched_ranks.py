"""Several ranks that a launcher starts with the same command: a mistake is reported once."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("arguments", "words"),
    [([], "--tensor-parallel-size 3 does not divide the model's 4 attention heads"), (["./none"], "./none")],
    ids=["three ranks on four heads", "no such model"],
)
def test_ranks_of_one_machine_report_a_mistake_once(arguments: list[str], words: str) -> None:
    common = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = [sys.executable, "-m", "pagewick", "complete", *arguments, "--prompts", "a"]
    ranks = [
        subprocess.Popen(
            ["env", *(f"{name}={value}" for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()),
             *command],
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert words in said[0] and said[0].count("error:") == 1
    assert said[1:] == ["", ""]
    assert all(rank.returncode for rank in ranks)
