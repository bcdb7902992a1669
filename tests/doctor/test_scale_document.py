"""The figures in docs/scale.md are those that its commands give now."""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pagewick.cli import cli
from pagewick.doctor import checkpoint, rank_weights
from pagewick.doctor import model as model_module
from pagewick.doctor import scale as scale_module
from pagewick.doctor.checkpoint import open_checkpoint
from pagewick.doctor.clusters import kind_names
from pagewick.doctor.findings import format_memory
from pagewick.doctor.support import Verdict
from pagewick.weights.progress import format_bytes
from tests.deep import IS_DEEP

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
TITLES = "| GPUs | offloaded per rank | weights | in host memory | KV cache | moved per token | 1 stream | streams |"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the document's commands in the repository, as if the engine supported every checkpoint."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(model_module, "verdict_of", lambda *given: Verdict(True))
    monkeypatch.setattr(checkpoint, "open_checkpoint", lambda model, environ, **options: opened(model))
    monkeypatch.setattr(model_module, "_is_cut", is_cut)
    for module in (model_module, scale_module):
        monkeypatch.setattr(module, "weights_of_rank", weights_of_rank)


# Cached for all commands: each model has a hundred thousand tensors. So are the functions that go through all of them
# for a number of ranks.
opened = functools.cache(lambda model: open_checkpoint(model, {}))


def cached(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of a model, of its checkpoint or tensors, and of numbers compute once for the same arguments."""
    found: dict[Any, Any] = {}

    def call(model: Any, given: Any, *others: Any) -> Any:
        key = (id(model), id(given), *others)
        if key not in found:
            # The objects are kept, so that no others get their ids.
            found[key] = (model, given, function(model, given, *others))
        return found[key][2]

    return call


is_cut, weights_of_rank = cached(model_module._is_cut), cached(rank_weights.weights_of_rank)


def run(command: str, *more: str) -> Result:
    return CliRunner().invoke(cli, [*shlex.split(command)[1:], *more], env={"COLUMNS": "200"})


def blocks_before(heading: str) -> list[str]:
    """For each place with `heading`, the lines of the bash block before it."""
    pattern = rf"```bash\n((?:pagewick [^\n]+\n)+)```\n\n{heading}"
    return [match[1] for match in re.finditer(pattern, TEXT)]


def row_of(found: dict[str, Any], per_rank: int) -> str:
    """A line of the table, from the JSON that the command of the line prints."""
    scale, plan = found["scale"], found["plan"]
    cluster, steps = scale["cluster"], scale["steps"]
    gpus = f"{cluster['num_gpus']} x {cluster['kind']['name']}"
    gpus = f"{cluster['num_nodes']} x {gpus}" if cluster["num_nodes"] > 1 else gpus
    cells = [gpus, str(per_rank), format_memory(plan["weights"]), format_memory(scale["host"]) if per_rank else "-"]
    if steps:
        cells += [format_memory(plan["kv_chosen"]), format_bytes(steps[0]["num_bytes"])]
        cells += [f"{steps[0]['tokens_per_second']:,.0f}"]
        cells += [f"{steps[-1]['num_sequences']}: {steps[-1]['tokens_per_second']:,.0f}"]
    else:
        cells += ["does not fit", "-", "-", "-"]
    return f"| {' | '.join(cells)} |"


def test_tables() -> None:
    commands = blocks_before(re.escape(TITLES))
    assert len(commands) == 2
    for block in commands if IS_DEEP else commands[:1]:
        lines = block.splitlines()
        rows = []
        for line in lines:
            offloaded = re.search(r"--num-experts-offload-per-rank (\d+)", line)
            rows.append(row_of(json.loads(run(line, "--json").stdout), int(offloaded[1]) if offloaded else 0))
        table = "\n".join([TITLES, "|---" * 8 + "|", *rows])
        assert table in TEXT, f"after\n{block}docs/scale.md should say\n{table}"


def test_outputs() -> None:
    commands = blocks_before("```text\n")
    assert len(commands) == 2
    for command in commands:
        shown = TEXT.split(f"{command}```\n\n```text\n")[1].split("```")[0]
        result = run(command.strip())
        assert shown in result.stdout, f"{command} prints\n{result.stdout}"
        assert result.exit_code == 0


def test_latent_cache() -> None:
    found = json.loads(run(blocks_before("```text\n")[0].strip(), "--json").stdout)["plan"]
    per_token, config = (
        found["kv_bytes_per_token"],
        json.loads((ROOT / "tests/doctor/data/DeepSeek-R1/config.json").read_text()),
    )
    layers, elements = config["num_hidden_layers"], config["kv_lora_rank"] + config["qk_rope_head_dim"]
    assert f"{elements} x {layers} x 2 = {per_token:,.0f} bytes" in TEXT
    whole = config["num_attention_heads"] * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    whole = 2 * layers * (whole + config["num_attention_heads"] * config["v_head_dim"])
    assert f"{whole:,} bytes" in TEXT and f"{whole / per_token:.0f} times" in TEXT


def test_kinds() -> None:
    document = (ROOT / "docs/command-line.md").read_text(encoding="utf-8")
    assert f"a known kind: {', '.join(kind_names())} |" in document


def test_counts() -> None:
    found = json.loads(run(blocks_before("```text\n")[0].strip(), "--json").stdout)
    assert f"{found['num_parameters']:,} parameters" in TEXT
    assert f"{found['num_active_parameters'] / 1e9:.1f} billion" in TEXT
    assert f"{found['stored_bytes'] / 1e9:.0f} GB" in TEXT
