"""The load of a GGUF file: python -m benchmarks.gguf_load [SHAPE] [--threads N]

Writes a Q8_0 file of random weights once, and starts a process that reads its description, makes its tokenizer and
loads its weights: once into memory that is new to the process, and once as a server starts, which requests this memory
while torch is imported. Prints seconds and processor seconds of each, beside those of copying the same bytes from the
page cache, and the most memory (PSS) of the process while it loads, in parts of the file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice, product
from pathlib import Path
from typing import Any, Final

from pagewick.cli.random_model import SHAPES, Shape, bench_cache_dir

VERSION: Final = 1
_COPIED_AT_ONCE: Final = 2**24
_PAUSE: Final = 0.004
_STEPS: Final = {
    "copy": "copy",
    "description": "description",
    "tokenizer": "tokenizer",
    "weights": "weights, new memory",
    "prepared": "weights, as a server",
}
# As long as the import of torch takes, during which a server's memory is made ready.
_IMPORT_SECONDS: Final = 2.0


def random_file(name: str) -> Path:
    """Return the file of a shape, and write it if needed."""
    path = bench_cache_dir() / f"{name}-{VERSION}-Q8_0.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        write_random_file(SHAPES[name], unfinished)
        unfinished.rename(path)
    return path


def write_random_file(shape: Shape, path: Path) -> None:
    """Write a Qwen3 in Q8_0 with as many tokens and merges as its vocabulary has room for."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_context_length(32768)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_rope_freq_base(shape.rope_theta)
    _add_vocabulary(writer, shape.vocab_size)
    random = np.random.default_rng(0)
    scale = np.frombuffer(np.float16(0.0003).tobytes(), np.uint8)
    stored_type = gguf.GGMLQuantizationType.Q8_0
    for tensor_name, size in _tensors(shape):
        if len(size) == 1:
            writer.add_tensor(tensor_name, np.ones(size, np.float32))
            continue
        blocks = random.integers(0, 256, (size[0], size[1] // 32, 34), np.uint8)
        blocks[..., :2] = scale
        writer.add_tensor(tensor_name, blocks.reshape(size[0], -1), raw_dtype=stored_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: Any, vocab_size: int) -> None:
    """Add all bytes, then their pairs and threes, as byte pair encoding makes them."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    firsts = [*letters, *map("".join, product(letters, repeat=2))]
    merges = [f"{first} {second}" for first, second in islice(product(firsts, letters), vocab_size - len(letters))]
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(merges)
    writer.add_eos_token_id(vocab_size - 1)


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = (count * shape.head_dim for count in (shape.num_attention_heads, shape.num_key_value_heads))
    yield "token_embd.weight", (shape.vocab_size, hidden)
    yield "output_norm.weight", (hidden,)
    for layer in range(shape.num_hidden_layers):
        for name, size in {
            "attn_norm": (hidden,),
            "attn_q": (queries, hidden),
            "attn_k": (keys, hidden),
            "attn_v": (keys, hidden),
            "attn_output": (hidden, queries),
            "attn_q_norm": (shape.head_dim,),
            "attn_k_norm": (shape.head_dim,),
            "ffn_norm": (hidden,),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }.items():
            yield f"blk.{layer}.{name}.weight", size


def pss(process: str = "self") -> int:
    """Return the memory of a process in bytes; a page that others share counts in part."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


class MemoryWatch:
    """Samples this process's memory while a block runs. peak: the most beyond what it had before."""

    def __init__(self) -> None:
        self.peak = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        before, is_over = pss(), threading.Event()

        def sample() -> None:
            while not is_over.wait(_PAUSE):
                self.peak = max(self.peak, pss() - before)

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def copy(path: Path) -> None:
    """Read a file from the page cache, piece by piece into one buffer."""
    buffer = bytearray(_COPIED_AT_ONCE)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def measure(path: Path, num_threads: int) -> dict[str, Any]:
    """Return seconds, processor seconds and memory of loading; run it in a process of its own."""
    import torch

    from pagewick.config import EngineConfig
    from pagewick.engine import preflight
    from pagewick.engine.model_loading import load_model
    from pagewick.engine.startup import starting
    from pagewick.parallel.collectives import Collectives
    from pagewick.text.tokenizer import Tokenizer

    config = EngineConfig(model=str(path), num_threads=num_threads, device="cpu")
    found: dict[str, Any] = {"file_bytes": path.stat().st_size}

    def timed(name: str, call: Callable[[], object]) -> object:
        start, cpu_start = time.monotonic(), time.process_time()
        result = call()
        found[name] = (time.monotonic() - start, time.process_time() - cpu_start)
        return result

    copy(path)
    timed("copy", lambda: copy(path))
    timed("description", lambda: preflight.check_models(config))
    timed("tokenizer", lambda: Tokenizer.from_directory(path))

    def load() -> object:
        return load_model(config, Collectives.single(), torch.device("cpu"))

    timed("weights", load)
    with starting(config):
        time.sleep(_IMPORT_SECONDS)
        timed("prepared", load)
    watch = MemoryWatch()
    with watch.watching(), starting(config):
        time.sleep(_IMPORT_SECONDS)
        load()
    return found | {"peak_bytes": watch.peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.file is not None:
        print(json.dumps(measure(given.file, given.threads)))
        return
    path = random_file(given.shape)
    command = [sys.executable, "-m", "benchmarks.gguf_load", "--file", str(path), "--threads", str(given.threads)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    print(f"{path.name}: {found['file_bytes'] / 1e9:.2f} GB, {given.threads} threads")
    for name, meaning in _STEPS.items():
        seconds, cpu_seconds = found[name]
        print(f"{meaning:24} {seconds:6.2f} s, {cpu_seconds:6.2f} s of processors")
    print(f"peak memory {found['peak_bytes'] / found['file_bytes']:.2f} x the file")


if __name__ == "__main__":
    main()
