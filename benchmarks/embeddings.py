"""`python -m benchmarks.embeddings MODEL`: embeddings by Pagewick, llama-server and transformers, in the same rounds.

MODEL is a directory with an encoder. Texts are random token ids, the same for all. Both servers get one HTTP request
with all texts of a measurement; transformers gets batches of 32 of like length, as sentence-transformers makes them,
and no HTTP. Before the first round, the vectors are compared: the least cosine between any two engines is printed.

The limit of many texts is arithmetic: 2 operations for each weight of the layers and token, and those of attention.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import click
import numpy as np

from benchmarks.peer_llama_cpp import VARIABLE
from benchmarks.server_process import ServerProcess, free_port
from pagewick.devices import num_cores

# Name -> (number of texts, tokens of the shortest, tokens of the longest).
MEASUREMENTS = {
    "1 text of 16": (1, 16, 16),
    "1 text of 500": (1, 500, 500),
    "64 texts of 32": (64, 32, 32),
    "64 texts of 250": (64, 250, 250),
    "64 texts of 8 to 500": (64, 8, 500),
}
BATCH = 32
Texts = Sequence[list[int]]
Embed = Callable[[Texts], Any]


def make_texts(name: str, seed: int, edges: tuple[int, int]) -> list[list[int]]:
    number, shortest, longest = MEASUREMENTS[name]
    random = Random(seed)
    lengths = [round(shortest + (longest - shortest) * place / max(1, number - 1)) for place in range(number)]
    random.shuffle(lengths)
    return [[edges[0], *(random.randrange(2000, 25000) for _ in range(n - 2)), edges[1]] for n in lengths]


def over_http(url: str, fields: dict[str, Any]) -> Embed:
    """Return what asks a server for all texts in one request, and returns the vectors."""

    def embed(texts: Texts) -> Any:
        body = json.dumps({"model": "m", "input": list(texts), **fields}).encode()
        request = urllib.request.Request(f"{url}/embeddings", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request) as response:
            return np.array([one["embedding"] for one in json.load(response)["data"]])

    return embed


def with_transformers(model: Path, dtype: str) -> Embed:
    # Here, so that pagewick is imported before torch and can set up its threads.
    import torch
    import transformers

    torch.set_num_threads(num_cores())
    loaded = transformers.AutoModel.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def embed(texts: Texts) -> Any:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        found: dict[int, Any] = {}
        for start in range(0, len(order), BATCH):
            places = order[start : start + BATCH]
            width = len(texts[places[0]])
            ids = torch.tensor([texts[place] + [0] * (width - len(texts[place])) for place in places])
            mask = torch.tensor([[1] * len(texts[place]) + [0] * (width - len(texts[place])) for place in places])
            with torch.inference_mode():
                states = loaded(ids, attention_mask=mask).last_hidden_state.float()
            sums = (states * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
            found.update(zip(places, torch.nn.functional.normalize(sums, dim=1).numpy(), strict=True))
        return np.array([found[place] for place in range(len(texts))])

    return embed


def least_cosine(engines: dict[str, Embed], texts: Texts) -> float:
    vectors = [embed(texts) for embed in engines.values()]
    return min(float((one * other).sum(1).min()) for one in vectors for other in vectors)


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--dtype", default="float32", show_default=True, help="Of Pagewick and transformers.")
@click.option("--gguf", type=click.Path(exists=True, path_type=Path), help=f"For llama.cpp, in {VARIABLE}.")
@click.option("--edges", default=(101, 102), show_default=True, type=(int, int), help="Tokens around each text.")
@click.option("--rounds", default=5, show_default=True)
def main(model: Path, dtype: str, gguf: Path | None, edges: tuple[int, int], rounds: int) -> None:
    """Print tokens per second, median (range) of the rounds, and the median of their ratios."""
    threads = str(num_cores())
    with ExitStack() as cleanup, tempfile.TemporaryDirectory() as logs:
        engines: dict[str, Embed] = {}
        port = free_port()
        command = ["pagewick", "serve", str(model), "--dtype", dtype, "--port", str(port), "--served-model-name", "m"]
        server = ServerProcess(command, port, Path(logs) / "pagewick", model="m", route="embeddings")
        cleanup.callback(server.stop)
        engines["Pagewick"] = over_http(server.url, {"pooling": "mean"})
        if gguf is not None:
            tree, port = Path(os.environ[VARIABLE]), free_port()
            program = tree / "build" / "bin" / "llama-server"
            command = [str(program), "-m", str(gguf), "--embedding", "--pooling", "mean", "-t", threads, "-tb", threads]
            command += ["-c", str(64 * 512), "-np", "64", "-b", "2048", "-ub", "2048", "--port", str(port), "--no-ui"]
            paths = {"LD_LIBRARY_PATH": str(program.parent)}
            peer = ServerProcess(command, port, Path(logs) / "llama", model="m", route="embeddings", environment=paths)
            cleanup.callback(peer.stop)
            engines["llama.cpp"] = over_http(peer.url, {})
        engines["transformers"] = with_transformers(model, dtype)
        click.echo(f"least cosine: {least_cosine(engines, make_texts('64 texts of 8 to 500', 1, edges)):.5f}")
        rates: dict[tuple[str, str], list[float]] = {}
        for index in range(rounds + 1):
            for name in MEASUREMENTS:
                texts = make_texts(name, index, edges)
                order = [*engines][index % len(engines) :] + [*engines][: index % len(engines)]
                for engine in order:
                    time.sleep(0.5)
                    started = time.perf_counter()
                    engines[engine](texts)
                    if index:
                        rate = sum(map(len, texts)) / (time.perf_counter() - started)
                        rates.setdefault((name, engine), []).append(rate)
        for name in MEASUREMENTS:
            parts = []
            for engine in engines:
                found = rates[name, engine]
                parts.append(f"{engine} {statistics.median(found):,.0f} ({min(found):,.0f}-{max(found):,.0f})")
                if engine != "Pagewick":
                    pairs = zip(rates[name, "Pagewick"], found, strict=True)
                    parts[-1] += f" {statistics.median(ours / theirs for ours, theirs in pairs):.2f} x"
            click.echo(f"{name}: {', '.join(parts)} tokens/s")


if __name__ == "__main__":
    main()
