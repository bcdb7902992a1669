"""Each architecture beside transformers in bfloat16: neither is exact, and ours is not further from exact results.

python -m tests.models.test_bf16 prints the table of docs/models.md.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from tests.deep import IS_DEEP
from tests.models.answers import answers, judge, make_prompts, running
from tests.models.checkpoints import VARIANTS, auto_model, make_model, write_checkpoint
from tests.models.test_tensors import VARIANT_OF

PROMPTS = make_prompts()


@dataclass(frozen=True)
class Agreement:
    """same_tokens: share of our greedy tokens that transformers chooses, too, given the same tokens before them.

    difference: mean absolute difference of logits, ours from transformers'. our_error, their_error: of each from those
    of the same weights in float32.
    """

    same_tokens: float
    difference: float
    our_error: float
    their_error: float


def measure(name: str, directory: Path) -> Agreement:
    variant = VARIANTS[name]
    write_checkpoint(name, directory)
    source = directory
    if "moondream" in variant.entries:
        # transformers cannot read it, but the same weights as Phi.
        source = directory / "phi"
        make_model(name).save_pretrained(source)  # type: ignore[operator]
    model = auto_model(transformers.AutoConfig.from_pretrained(source)).from_pretrained(
        source,
        dtype=torch.bfloat16,
        attn_implementation="eager",
        # The other ones want rows of whole 16 bytes.
        experts_implementation="eager",
    )
    with running(directory, **{**variant.engine, "dtype": "bfloat16"}) as engine:
        found = answers(engine, PROMPTS)
    theirs = torch.cat(judge(model, PROMPTS, found))
    exact = torch.cat(judge(model.float(), PROMPTS, found))
    ours = torch.cat([answer.logits for answer in found])
    token_ids = torch.tensor([token_id for answer in found for token_id in answer.token_ids])
    return Agreement(
        same_tokens=float((theirs.argmax(-1) == token_ids).float().mean()),
        difference=float((ours - theirs).abs().mean()),
        our_error=float((ours - exact).abs().mean()),
        their_error=float((theirs - exact).abs().mean()),
    )


@pytest.mark.parametrize("architecture", [*VARIANT_OF][:: 1 if IS_DEEP else 3])
def test_it_is_as_near_as_transformers(architecture: str, tmp_path: Path) -> None:
    found = measure(VARIANT_OF[architecture], tmp_path)
    assert found.our_error < 1.25 * found.their_error
    assert found.same_tokens > 0.8
    # Not the same numbers by chance: it did compute in bfloat16.
    assert found.our_error > 1e-3


def main() -> None:
    print("| architecture | greedy tokens equal | mean difference | our mean error | transformers' mean error |")
    print("|---|---|---|---|---|")
    for architecture, name in VARIANT_OF.items():
        with tempfile.TemporaryDirectory() as directory:
            found = measure(name, Path(directory))
        print(
            f"| {architecture} | {found.same_tokens:.1%} | {found.difference:.4f} | {found.our_error:.4f} "
            f"| {found.their_error:.4f} |"
        )


if __name__ == "__main__":
    main()
