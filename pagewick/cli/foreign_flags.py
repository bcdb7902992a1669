"""Flags of vLLM, llama.cpp, candle-vllm and vllm.rs that have no field here: what changes nothing, and what cannot be.

Flags that mean the same as one of ours are in the tables ALIASES beside the fields. docs/coming-from.md explains all of
them to users; a test compares.

A line is flags and a sentence. `--x` takes no value, `--x=` any, and of `--x=1|auto` these values change nothing: they
ask for what is so anyway. `--x=?on` takes a value or none, and none is "on".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import click

Lines = tuple[tuple[str, str], ...]

_NO_GGUF = "GGUF files are not supported yet; give a directory or an id with safetensors"
_NO_LORA = "LoRA adapters are not supported yet; merge the adapter into its model"
_NO_TOOLS = "calls of tools are not parsed yet"
_NO_QUANTIZATION = "quantized weights are not supported yet; use --dtype bfloat16 and the unquantized model"
_ONE_DEVICE = "a model is not divided between a GPU and a CPU; --device cuda or --device cpu takes all of it"

# Of every command that runs an engine: such a flag is accepted, with a note.
NOTED: Lines = (
    ("--enable-chunked-prefill --cont-batching -cb", "prompts are always computed in chunks, beside running answers"),
    ("--multi-process --multithread --distributed-executor-backend=", "every rank is always a process of its own"),
    ("--holding-time=", "no request is held back; it joins the next step"),
    ("--trust-remote-code", "code of a model is never run, and what is supported needs none"),
    ("--enforce-eager --disable-cuda-graph", "there are no CUDA graphs yet"),
    ("--attention-backend=", "the attention kernel is chosen by the device"),
    ("--flash-attn=?on|auto -fa=?on|auto", "the attention kernel is chosen by the device; say on, auto or nothing"),
    ("--no-mmap --mmap", "weights are mapped to be read, and copied"),
    ("--log --verbose -v", "the log is on; --log-level debug says more"),
    ("--enable-log-stats --metrics", "throughput is always logged and /metrics always there"),
    ("--no-context-shift", "a context is never shifted: at its end the answer ends"),
    ("--warmup --no-warmup", "there is nothing to warm up"),
    ("--load-format=auto|safetensors", "the format is known by the files"),
    ("--disable-custom-all-reduce", "there is no custom all-reduce"),
    ("--tokenizer-mode=auto|hf|fast --config-format=auto|hf", "the files of the model say so"),
    ("--defrag-thold= -dt=", "a paged KV cache has nothing to defragment"),
    ("--scheduling-policy=fcfs|priority", "requests with a priority go first, the others in their order"),
    ("--prefix-caching-hash-algo=", "blocks are named by a cryptographic hash"),
    (
        "--max-num-partial-prefills= --max-long-partial-prefills= --threads-batch= -tb=",
        "this is decided for every step",
    ),
)

# Of every command that runs an engine: such a flag is refused, and the sentence says what to do.
REFUSED: Lines = (
    ("--quant= --isq= --quantization= -q=", _NO_QUANTIZATION),
    ("--weight-file= --f= --hf-file= -hff= --gguf-file=", _NO_GGUF),
    ("--gpu-memory-utilization= --kv-fraction= --mem-fraction-static=", "a share of memory cannot be given yet; "
     "--kv-cache-memory says how much the KV cache takes, and without it most of what is free is taken"),
    ("--fp8-kvcache", "an fp8 KV cache is not supported yet; --kv-cache-dtype bfloat16 takes the least memory"),
    ("--cache-type-k= -ctk= --cache-type-v= -ctv=", "keys and values are stored alike; use --kv-cache-dtype, which "
     "takes float32, bfloat16 and float16"),
    ("--calculate-kv-scales --kv-cache-dtype-skip-layers=", "an fp8 KV cache is not supported yet"),
    ("--cpu-mem-fold= --cpu-offload-gb=0", "give --num-experts-offload-per-rank for experts and --swap-space for KV "
     "blocks; other weights are not offloaded yet"),
    ("--enable-expert-parallel --ep=", "every expert is cut between the ranks, by --tensor-parallel-size"),
    ("--n-cpu-moe=0 --cpu-moe --override-tensor= -ot=", "experts are kept in host memory by number, not by layer: give "
     "--num-experts-offload-per-rank"),
    ("--mamba-fraction=", "state-space models are not supported yet"),
    ("--lora= --lora-scaled= --lora-modules= --enable-lora --max-loras= --max-lora-rank= --lora-dir=", _NO_LORA),
    ("--pipeline-parallel-size=1 -pp=1", "pipeline parallelism is not supported yet; use --tensor-parallel-size"),
    ("--data-parallel-size=1 -dp=1", "start one server per replica and a proxy before them"),
    ("--context-parallel-size=1 --decode-context-parallel-size=1 -dcp=1", "context parallelism is not supported yet; "
     "use --tensor-parallel-size"),
    ("--num-nodes=1 --nnodes=1 --node-rank=0 --master-addr= --master-port= --headless", "several machines are started "
     "with torchrun, mpirun or Slurm: torchrun --nnodes 2 --nproc-per-node 8 -m pagewick serve ..."),
    ("--rpc= --tensor-split= -ts= --split-mode= -sm= --main-gpu= -mg=", "GPUs are shared equally, by "
     "--tensor-parallel-size; CUDA_VISIBLE_DEVICES says which"),
    ("--n-gpu-layers=99|999|-1|all|auto --gpu-layers=99|999|-1|all|auto -ngl=99|999|-1|all|auto", _ONE_DEVICE),
    ("--hf-token= -hft=", "a token on the command line is seen by everybody on the machine; set HF_TOKEN"),
    ("--hf-token-path=", "set HF_TOKEN_PATH"),
    ("--download-dir= --cache-dir=", "set HF_HUB_CACHE to the directory"),
    ("--offline", "set HF_HUB_OFFLINE=1"),
    ("--tokenizer= --tokenizer-config= --tokenizer-revision= --hf-config-path= --code-revision= --skip-tokenizer-init",
     "tokenizer and config.json are the model's; copy the model's directory and change them there"),
    ("--hf-overrides= --override-kv=", "config.json says so; copy the model's directory and change it there, or give "
     "--rope-scaling and --rope-theta if that is what it is for"),
    ("--rope-scale= --rope-freq-scale= --yarn-scaling-factor= --yarn-orig-ctx=", "--rope-scaling says it all, "
     "as JSON with rope_type, factor and original_max_position_embeddings"),
    ("--prefix-cache-max-tokens= --cache-ram= -cram=", "the prefix cache takes what the KV cache has free; "
     "--kv-cache-memory, --swap-space and --kv-cache-disk set the sizes"),
    ("--cache-reuse= --context-shift --swa-full --slot-save-path=", "the prefix cache reuses whole prefixes, and "
     "--kv-cache-disk keeps them over restarts"),
    ("--mlock --numa=", "not supported yet; ulimit and numactl do it from outside"),
    ("--ubatch-size= -ub=", "--max-num-prefill-tokens is what prompts may take of a step beside running answers"),
    ("--speculative-config= --spec-type=", "--speculative-method, --speculative-model and "
     "--num-speculative-tokens say it"),
    ("--kv-transfer-config= --pd-server --pd-client --pd-url=", "prefill and decode in different servers is not "
     "supported yet"),
    ("--mmproj= -mm= --limit-mm-per-prompt= --media-path= --allowed-local-media-path=",
     "images and sound are not supported yet"),
    ("--grammar= --grammar-file= --json-schema= -j= --guided-decoding-backend= --structured-outputs-config=",
     "structured output is not supported yet"),
    ("--embedding --embeddings --pooling= --rerank --reranking --task=generate|auto --runner=generate|auto "
     "--convert=none|auto", "only text is generated; embeddings and reranking are not supported yet"),
    ("--compilation-config= -cc= --optimization-level=", "there is nothing to compile"),
)  # fmt: skip

# Of `serve` only.
SERVER_NOTED: Lines = (
    ("--server --server-mode --jinja", "that is what pagewick serve does"),
    ("--response-role=assistant", "that is the role"),
    ("--disable-fastapi-docs", "there are no such pages"),
    ("--disable-uvicorn-access-log --disable-access-log", "requests have one line; --no-log-requests leaves it out"),
    ("--enable-prompt-tokens-details", "usage always has them"),
    ("--disable-frontend-multiprocessing --api-server-count=1", "HTTP has a process of its own, the engine another"),
)
SERVER_REFUSED: Lines = (
    ("--temperature= --temp= --top-k= --top-p= --min-p= --penalty= --repeat-penalty= --repeat-last-n= "
     "--presence-penalty= --frequency-penalty=", "requests say it; what they leave open is the model's, from "
     "generation_config.json in its directory"),
    ("--max-tokens= --max-gen-tokens= --max= --n-predict= --predict= -n=", "requests say max_tokens; without it an "
     "answer may fill the context, which --max-model-len limits"),
    ("--generation-config=auto --override-generation-config=", "what requests leave open is the model's, from "
     "generation_config.json in its directory"),
    ("--enable-auto-tool-choice --tool-call-parser= --tool-parser-plugin= --enforce-parser= --tool-prompt= "
     "--mcp-command= --mcp-args= --mcp-config= --tool-server=", _NO_TOOLS),
    ("--ssl-keyfile= --ssl-certfile= --ssl-ca-certs= --ssl-key-file= --ssl-cert-file=", "let a proxy such as nginx or "
     "Caddy speak TLS, and listen on 127.0.0.1"),
    ("--uds=", "a Unix socket is not supported yet; give --host and --port"),
    ("--root-path= --api-prefix= --path=", "let a proxy change paths"),
    ("--timeout= -to=", "say which: --request-timeout, --write-timeout or --keep-alive-timeout"),
    ("--middleware=", "nothing is loaded into the server; put a proxy before it"),
    ("--slots --props --models-dir= --models-max=", "not supported yet; one server serves one model"),
    ("--i --interactive -i -cnv --conversation", "pagewick chat talks in the terminal"),
    ("--prompts= --prompt= --batch=", "pagewick complete answers prompts, and pagewick bench measures"),
    ("--log-config-file= --max-log-len= --log-file=", "the log goes to stderr; --log-format, --log-level and "
     "--log-prompts say how"),
    ("--allowed-methods= --allowed-headers= --allow-credentials", "--allowed-origins is all that is needed"),
)  # fmt: skip

# Of `chat` and `complete`.
TERMINAL_NOTED: Lines = (("--i --interactive -i -cnv --conversation", "pagewick chat is a conversation"),)
TERMINAL_REFUSED: Lines = (
    ("--server", "pagewick serve is the server"),
    ("--system-prompt= -sys=", "pagewick chat takes --system"),
)


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """value: what it takes, none, perhaps one ("optional"), or one. harmless: the values that change nothing."""

    name: str
    sentence: str
    is_refused: bool
    value: Literal["none", "optional", "one"]
    harmless: tuple[str, ...]

    def verdict(self, given: str) -> bool:
        """Whether this value is refused."""
        if self.harmless:
            return given not in self.harmless
        return self.is_refused


def parse(lines: Lines, *, is_refused: bool) -> Iterator[ForeignFlag]:
    for names, sentence in lines:
        for text in names.split():
            name, equals, values = text.partition("=")
            is_optional = values.startswith("?")
            value: Literal["none", "optional", "one"] = "none" if not equals else "optional" if is_optional else "one"
            harmless = tuple(filter(None, values.removeprefix("?").split("|")))
            yield ForeignFlag(name, sentence, is_refused, value, harmless)


def foreign_flags(*, is_server: bool, is_terminal: bool) -> list[ForeignFlag]:
    """All of a command: `serve`, `chat` or `complete` (is_terminal), or another that runs an engine."""
    found = [*parse(NOTED, is_refused=False), *parse(REFUSED, is_refused=True)]
    if is_server:
        found += [*parse(SERVER_NOTED, is_refused=False), *parse(SERVER_REFUSED, is_refused=True)]
    if is_terminal:
        found += [*parse(TERMINAL_NOTED, is_refused=False), *parse(TERMINAL_REFUSED, is_refused=True)]
    return found


def foreign_options(flags: Iterable[ForeignFlag], taken: Collection[str]) -> list[click.Option]:
    """A hidden option for each whose name is not `taken` by an option of the command's own."""
    return [_option(flag) for flag in flags if flag.name not in taken]


class ForeignOption(click.Option):
    """A flag that only says something."""


def _option(flag: ForeignFlag) -> ForeignOption:
    attributes: dict[str, Any] = {"type": str}
    if flag.value == "none":
        attributes = {"is_flag": True}
    elif flag.value == "optional":
        attributes |= {"is_flag": False, "flag_value": "on"}
    callback: Callable[[click.Context, click.Parameter, Any], None] = partial(_tell, flag)
    name = f"foreign{flag.name.replace('-', '_')}"
    return ForeignOption(
        [flag.name, name], default=None, hidden=True, expose_value=False, callback=callback, **attributes
    )


def _tell(flag: ForeignFlag, ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if not value or ctx.resilient_parsing:
        return
    if flag.verdict(str(value)):
        raise click.UsageError(f"{flag.name}: {flag.sentence}.", ctx)
    if not flag.harmless:
        click.echo(f"note: {flag.name} changes nothing: {flag.sentence}", err=True)
