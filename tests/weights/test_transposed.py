"""GPT-2's weights lie transposed: every reader sees them as [out, in], and no file gets them half and half."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewick.cli.converting.conversion import Conversion, convert
from pagewick.errors import ConfigError
from pagewick.weights.description import describe
from pagewick.weights.opening import open_source
from pagewick.weights.progress import Progress
from tests.models.answers import answers, make_prompts, running
from tests.models.checkpoints import make_model, save, write_checkpoint
from tests.models.variants import VARIANTS

LYING = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def test_they_are_turned(tmp_path: Path) -> None:
    write_checkpoint("gpt2-scaled-by-layer", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    described = {tensor.name: tensor.shape for tensor in describe(tmp_path).tensors}
    with open_source(tmp_path) as source:
        for name, tensor in stored.items():
            expected = tensor.T if name.endswith(LYING) else tensor
            assert source.shape(name) == described[name] == tuple(expected.shape)
            assert torch.equal(source.get(name), expected)
            source.release(source.get(name))
            assert torch.equal(source.get(name), expected)
    assert sum(name.endswith(LYING) for name in stored) == 12


def test_the_first_files_of_gpt_2_have_shorter_names_and_masks(tmp_path: Path) -> None:
    write_checkpoint("gpt2", tmp_path)
    file, prompts = tmp_path / "model.safetensors", make_prompts((3, 40))
    with running(tmp_path) as engine:
        expected = answers(engine, prompts, num_tokens=5)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 4, 4).tril() for layer in range(3)}
    save_file({**tensors, **masks, "h.0.attn.masked_bias": torch.tensor(-1e4)}, file)
    with running(tmp_path) as engine:
        found = answers(engine, prompts, num_tokens=5)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.logits, other.logits)


def test_a_converted_checkpoint_has_none(tmp_path: Path) -> None:
    write_checkpoint("gpt2", tmp_path / "source")
    to_int8 = Conversion(to="gptq", bits=8, group_size=-1, method="rtn")
    convert(tmp_path / "source", tmp_path / "target", to_int8, progress=Progress(), note=print)
    with open_source(tmp_path / "source") as source, open_source(tmp_path / "target", mix="f32") as target:
        assert set(source.names()) == set(target.names())
        for name in source.names():
            steps = source.get(name).abs().max() / 127
            torch.testing.assert_close(target.get(name), source.get(name), atol=float(steps), rtol=0)


def test_a_conversion_that_would_leave_some_lying_is_refused(tmp_path: Path) -> None:
    narrow = {**VARIANTS["gpt2"].all_entries(), "n_inner": 36}
    save(make_model("gpt2", narrow), tmp_path / "source")
    to_int4 = Conversion(to="gptq", bits=4, group_size=-1, method="rtn")
    with pytest.raises(ConfigError, match=r"mlp\.c_fc\.weight.*lie transposed"):
        convert(tmp_path / "source", tmp_path / "target", to_int4, progress=Progress(), note=print)
