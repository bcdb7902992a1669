"""The errors of logits: means by hand, and each engine's program, with a small model or with a library of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import logits_pagewick
from benchmarks.accuracy import NUM_LAST, PROMPT, LogitsCommand, LogitsError, mean_error, measure_errors
from benchmarks.logits_pagewick import last_logits
from benchmarks.openvino_model import LOGITS_SCRIPT
from benchmarks.peer_llama_cpp import TOOLS, IkLlamaCpp, LlamaCpp, RepackedIkLlamaCpp
from benchmarks.peers_report import weights_block
from pagewick.engine.messages import EngineRequest
from pagewick.errors import ConfigError
from pagewick.sampling_params import SamplingParams
from tests.models.answers import running
from tests.weights.gguf.random_models import VOCAB_SIZE, write_random

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None and shutil.which("gcc") is None, reason="needs gcc")
TOKENS = [3, 1, 4, 1, 5, 9, 2]


def test_an_error_is_in_standard_deviations() -> None:
    expected = np.array([[1.0, -1.0], [1.0, -1.0]], np.float32)
    assert mean_error(expected + np.float32(0.25), expected) == pytest.approx(0.25)
    assert mean_error(3 * (expected + np.float32([[0.5], [0.0]])), 3 * expected) == pytest.approx(0.25)


def writing(value: float) -> LogitsCommand:
    """Return a command whose logits are the last tokens, and in steps of one token `value` more."""
    code = f"""
import numpy, sys
tokens, num_last, out = sys.argv[1:]
last = numpy.fromfile(tokens, numpy.int32)[-int(num_last):]
logits = numpy.repeat(last[:, None], 10, 1).astype(numpy.float32)
numpy.stack([logits, logits + numpy.float32({value})]).tofile(out)
"""
    return LogitsCommand([sys.executable, "-c", code])


def test_every_engine_is_compared_with_the_reference(tmp_path: Path) -> None:
    found = measure_errors({"exact": lambda: writing(0.0), "other": lambda: writing(2.0)}, writing(9.0), 10, tmp_path)
    deviation = np.std(PROMPT.prompts(10, 2_000_000)[0][-NUM_LAST:])
    assert found["exact"] == LogitsError(0.0, 0.0)
    assert found["other"] == LogitsError(0.0, pytest.approx(2.0 / deviation))


def test_a_program_that_fails_is_quoted(tmp_path: Path) -> None:
    failing = LogitsCommand([sys.executable, "-c", "import sys; sys.exit('no such file')"])
    with pytest.raises(ConfigError, match="computes no logits: no such file"):
        measure_errors({}, failing, 10, tmp_path)


def test_our_logits_are_those_that_the_engine_uses(tmp_path: Path) -> None:
    token_ids = [(7 * place + 3) % VOCAB_SIZE for place in range(40)]
    with running(write_random(tmp_path / "model.gguf", "dense", "Q8_0"), enable_prefix_caching=False) as engine:
        logits = last_logits(engine, token_ids, 9)
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        engine.add(EngineRequest(request_id="scored", prompt_token_ids=token_ids, params=params, seed=0))
        scored = [one.logprob for delta in engine.step() for one in delta.prompt_logprobs or []]
    found = logits[:-1].log_softmax(-1)[torch.arange(8), torch.tensor(token_ids[-8:])]
    assert scored[-8:] == found.tolist()


def test_our_program_writes_the_same_logits_token_by_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_random(tmp_path / "model.gguf", "dense", "Q4_0")
    np.array(TOKENS, np.int32).tofile(tmp_path / "tokens")
    found = []
    for ways in ("both", "prompt"):
        given = [str(model), "bfloat16", "1", ways, str(tmp_path / "tokens"), "3", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["logits_pagewick", *given])
        logits_pagewick.main()
        found += list(np.fromfile(tmp_path / "out", np.float32).reshape(-1, 3, VOCAB_SIZE))
    prompt, token_by_token, alone = found
    assert (prompt == token_by_token).all() and (prompt == alone).all() and prompt.std() > 0


# A library in llama.cpp's place: the logits of a token are its id, its position, the tokens of its batch, the threads,
# and whether weights are repacked.
HEADER = """
#pragma once
#include <stdbool.h>
#include <stdint.h>
enum ggml_log_level { GGML_LOG_LEVEL_ERROR = 4 };
struct llama_model;
struct llama_context;
struct llama_model_params { bool repack_tensors, use_mmap; };
struct llama_context_params {
  uint32_t n_ctx, n_batch; int32_t n_threads, n_threads_batch;
  bool flash_attn, fused_moe_up_gate, fused_up_gate, fused_mmad;
};
struct llama_batch { int32_t n_tokens, *token, *pos, *n_seq_id, **seq_id; int8_t* logits; };
void llama_log_set(void (*log)(enum ggml_log_level, const char*, void*), void* data);
void llama_backend_init(void);
struct llama_model_params llama_model_default_params(void);
struct llama_context_params llama_context_default_params(void);
struct llama_model* llama_model_load_from_file(const char* path, struct llama_model_params params);
struct llama_context* llama_init_from_model(struct llama_model* model, struct llama_context_params params);
void llama_free(struct llama_context* context);
struct llama_batch llama_batch_init(int32_t size, int32_t embd, int32_t num_seqs);
int32_t llama_decode(struct llama_context* context, struct llama_batch batch);
float* llama_get_logits_ith(struct llama_context* context, int32_t i);
"""
LIBRARY = """
#include <stdio.h>
#include <stdlib.h>
#include "llama.h"
struct llama_context { int num_seen, num_threads; struct llama_batch batch; };
static int is_repacked;
static float row[5];
void llama_log_set(void (*log)(enum ggml_log_level, const char*, void*), void* data) { (void)log; (void)data; }
void llama_backend_init(void) {}
struct llama_model_params llama_model_default_params(void) { return (struct llama_model_params){0}; }
struct llama_context_params llama_context_default_params(void) { return (struct llama_context_params){0}; }
struct llama_model* llama_model_load_from_file(const char* path, struct llama_model_params params) {
  is_repacked = params.repack_tensors;
  return (struct llama_model*)fopen(path, "rb");
}
struct llama_context* llama_init_from_model(struct llama_model* model, struct llama_context_params params) {
  struct llama_context* made = calloc(1, sizeof *made);
  (void)model;
  made->num_threads = params.n_threads;
  return made;
}
void llama_free(struct llama_context* context) { free(context); }
struct llama_batch llama_batch_init(int32_t size, int32_t embd, int32_t num_seqs) {
  struct llama_batch made = {0, calloc(size, 4), calloc(size, 4), calloc(size, 4), calloc(size, 8), calloc(size, 1)};
  (void)embd;
  for (int i = 0; i < size; ++i) made.seq_id[i] = calloc(num_seqs, 4);
  return made;
}
int32_t llama_decode(struct llama_context* context, struct llama_batch batch) {
  if (batch.pos[0] != context->num_seen) return 1;
  context->num_seen += batch.n_tokens;
  context->batch = batch;
  return 0;
}
float* llama_get_logits_ith(struct llama_context* context, int32_t i) {
  const struct llama_batch* batch = &context->batch;
  row[0] = batch->token[i], row[1] = batch->pos[i], row[2] = batch->n_tokens;
  row[3] = context->num_threads, row[4] = is_repacked;
  return row;
}
"""


def llama_tree(directory: Path) -> Path:
    """Return a source tree with that library, built."""
    built, includes = directory / "build" / "bin", directory / "include"
    for place in (built, includes, directory / "ggml"):
        place.mkdir(parents=True)
    (directory / "ggml" / "CMakeLists.txt").touch()
    (includes / "llama.h").write_text(HEADER)
    (directory / "llama.c").write_text(LIBRARY)
    command = ["gcc", "-shared", "-fPIC", f"-I{includes}", directory / "llama.c", "-o", built / "libllama.so"]
    subprocess.run(command, check=True)
    for tool in TOOLS:
        (built / tool).touch()
    return directory


@needs_compiler
@pytest.mark.parametrize(("kind", "is_repacked"), [(LlamaCpp, 0), (IkLlamaCpp, 0), (RepackedIkLlamaCpp, 1)])
def test_the_libraries_of_llama_cpp_are_asked(kind: type[LlamaCpp], is_repacked: int, tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    command = kind(llama_tree(tmp_path / "tree"), gguf, 3).logits_command(5, tmp_path)
    np.array(TOKENS, np.int32).tofile(tmp_path / "tokens")
    given = [str(tmp_path / "tokens"), "2", str(tmp_path / "out")]
    subprocess.run([*command.arguments, *given], check=True, env=dict(command.environment or {}))
    found = np.fromfile(tmp_path / "out", np.float32).reshape(2, 2, 5).tolist()
    assert found == [
        [[9, 5, 7, 3, is_repacked], [2, 6, 7, 3, is_repacked]],
        [[9, 5, 1, 3, is_repacked], [2, 6, 1, 3, is_repacked]],
    ]


def test_a_tree_without_shared_libraries_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "build" / "bin").mkdir(parents=True)
    (tmp_path / "ggml").mkdir()
    (tmp_path / "ggml" / "CMakeLists.txt").touch()
    for tool in TOOLS:
        (tmp_path / "build" / "bin" / tool).touch()
    with pytest.raises(ConfigError, match=r"PAGEWICK_PEER_LLAMA_CPP: there is no libllama\.so in .*; build shared"):
        LlamaCpp(tmp_path, tmp_path / "model.gguf", 1).logits_command(5, tmp_path)


# A module in OpenVINO's place: the logits of a token are its id, its position, and the tokens that its request has had.
OPENVINO = """
import numpy

class Named:
    def __init__(self, name): self.names = {name}

class Tensor:
    def __init__(self, data): self.data = data

class Request:
    def __init__(self): self.seen = 0

    def reset_state(self): self.seen = 0

    def infer(self, given):
        ids = given["input_ids"]
        self.seen += ids.shape[1]
        assert "token_type_ids" not in given and given["attention_mask"].shape == (1, self.seen)
        parts = [ids[0], given["position_ids"][0], numpy.full(ids.shape[1], self.seen)]
        self.logits = numpy.stack(parts, -1)[None]

    def get_tensor(self, name): return Tensor(getattr(self, name))

class Compiled:
    inputs = [Named(name) for name in ("input_ids", "attention_mask", "position_ids", "token_type_ids")]

    def create_infer_request(self): return Request()

class Core:
    def compile_model(self, path, device, options):
        assert path.name == "openvino_model.xml" and device == "CPU" and options["INFERENCE_NUM_THREADS"] == 2
        return Compiled()
"""


def test_openvino_is_asked_for_a_prompt_and_for_steps(tmp_path: Path) -> None:
    (tmp_path / "openvino.py").write_text(OPENVINO)
    np.array(TOKENS, np.int32).tofile(tmp_path / "tokens")
    given = [str(tmp_path), "2", str(tmp_path / "tokens"), "2", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, LOGITS_SCRIPT, *given], check=True, env=environment)
    found = np.fromfile(tmp_path / "out", np.float32).reshape(2, 2, 3).tolist()
    assert found == [[[9, 5, 7], [2, 6, 7]], [[9, 5, 6], [2, 6, 7]]]


def test_the_table_has_bits_and_errors_of_every_engine() -> None:
    result = {
        "format": "q8_0", "engines": {"pagewick": "Pagewick", "vllm": "vLLM"}, "bits": {"pagewick": 8.5, "vllm": 16.0},
        "accuracy": {"pagewick": {"prompt": 0.0123, "token_by_token": 0.0456}},
    }  # fmt: skip
    assert weights_block(result)[1] == [["Pagewick", "8.50", "1.23%", "4.56%"], ["vLLM", "16.00", "-", "-"]]
    assert weights_block({"engines": {"pagewick": "Pagewick"}})[1] == []
