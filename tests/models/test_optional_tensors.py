"""Published files of A.X K1 have no biases of routers, and norms that no layer uses."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from pagewick.weights.opening import open_source
from tests.models.answers import answers, judge, make_prompts, running
from tests.models.checkpoints import VARIANTS, make_model, save

BIAS = "mlp.gate.e_score_correction_bias"


def test_routers_without_a_bias(tmp_path: Path) -> None:
    model, prompts = make_model("a.x-k1"), make_prompts((3, 40))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()
    save(model, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if not name.endswith(BIAS)}
    save_file({**tensors, "model.layers.0.post_mlp_layernorm.weight": torch.ones(48)}, file)
    with open_source(tmp_path) as source:
        assert not any(name.endswith(BIAS) for name in source.names())
    with running(tmp_path) as engine:
        found = answers(engine, prompts, num_tokens=12)
    for answer, logits in zip(found, judge(model, prompts, found), strict=True):
        torch.testing.assert_close(answer.logits, logits, atol=VARIANTS["a.x-k1"].tolerance, rtol=0)
        assert answer.token_ids == logits.argmax(-1).tolist()
