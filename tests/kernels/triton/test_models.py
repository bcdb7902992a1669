"""Whole models by interpreted kernels, as with --batch-invariant on a GPU: a sum that no kernel serves is an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pagewick.kernels import TABLE, batch_invariance, triton
from pagewick.kernels.dispatch import Backend
from pagewick.kernels.triton import fallback
from tests.deep import IS_DEEP
from tests.engine.serving import request, running, serve
from tests.kernels.conftest import library_off
from tests.models.checkpoints import VARIANTS, write_checkpoint

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
# They have norms of queries alone, after the rotation and of values, and several residual streams.
NAMES = ["gemma-3n", "nanochat", "hunyuan-7b", "gemma-4-e2b"] if IS_DEEP else ["gemma-3n"]


@contextmanager
def only_kernels() -> Iterator[None]:
    """Let the kernels for GPUs serve tensors on the CPU, and fail where they do not serve a sum."""
    known, gpu = triton.OPERATIONS, triton.BACKEND
    backend = Backend(
        "triton", gpu.operations, lambda name, kind, dtype: dtype in known[name][1],
        quantized_weights=gpu.quantized_weights,
    )  # fmt: skip
    with library_off(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(TABLE, "backends", (backend,))
        patch.setattr(batch_invariance, "is_required", lambda: True)
        fallback._note.cache_clear()
        TABLE.choose_again()
        yield
    fallback._note.cache_clear()
    TABLE.choose_again()


@pytest.mark.parametrize("name", NAMES)
def test_no_sum_is_refused_and_tokens_are_those_of_a_cpu(name: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path)
    options = {"max_model_len": 96, "num_kv_blocks": 60, "max_steps_in_flight": 1, **VARIANTS[name].engine}
    wanted = [request(range(3, 6), "r0", max_tokens=2, ignore_eos=True, temperature=0.0)]
    with running(tmp_path, **options) as engine:
        expected = {at: answer.token_ids for at, answer in serve(engine, wanted).items()}
    with only_kernels(), running(tmp_path, **options) as engine:
        assert {at: answer.token_ids for at, answer in serve(engine, wanted).items()} == expected
