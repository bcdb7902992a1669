"""Flags of vLLM, llama.cpp, candle-vllm and vllm.rs that have no field here: they are accepted with a note or refused.

Flags that mean the same as one of ours are in the tables ALIASES beside the fields. docs/coming-from.md explains all of
them to users; a test compares it with these tables.

A line is flags and a sentence. `--x` takes no value and `--x=` takes one. For `--x=1|auto`, the values 1 and auto ask
for what Pagewick does anyway and are accepted; others are refused. `--x=?on` takes one value or none, which means "on".
"""

from __future__ import annotations

from typing import Any

import click

Lines = tuple[tuple[str, str], ...]

_NO_GGUF = "GGUF files are not supported yet; give a directory or an id with safetensors"
_NO_LORA = "LoRA adapters are not supported yet; merge the adapter into its model"
_NO_TOOLS = "tool calls are not parsed yet"
_NO_QUANTIZATION = "quantized weights are not supported yet; use --dtype bfloat16 and the unquantized model"
_ONE_DEVICE = "a model is not split between a GPU and a CPU; --device cuda or --device cpu runs all of it there"

# Flags of every command that runs an engine: these are accepted, with a note.
NOTED: Lines = (
    ("--enable-chunked-prefill --cont-batching -cb", "prompts are always computed in chunks, beside running requests"),
    ("--multi-process --multithread --distributed-executor-backend=", "every rank is always a process of its own"),
    ("--holding-time=", "requests are never held back: a new one joins the next step"),
    ("--trust-remote-code", "a model's code is never executed, and no supported model needs it"),
    ("--enforce-eager --disable-cuda-graph", "there are no CUDA graphs yet"),
    ("--attention-backend=", "the device determines the attention kernel"),
    ("--flash-attn=?on|auto -fa=?on|auto", "the device determines the attention kernel; give on, auto or no value"),
    ("--no-mmap --mmap", "weights are read through a memory map and copied"),
    ("--log --verbose -v", "the log is on; --log-level debug says more"),
    ("--enable-log-stats --metrics", "throughput is always logged and /metrics always served"),
    ("--no-context-shift", "the context is never shifted: a response ends when it is full"),
    ("--warmup --no-warmup", "there is nothing to warm up"),
    ("--load-format=auto|safetensors", "the format follows from the files"),
    ("--disable-custom-all-reduce", "there is no custom all-reduce"),
    ("--tokenizer-mode=auto|hf|fast --config-format=auto|hf", "the model's files determine this"),
    ("--defrag-thold= -dt=", "a paged KV cache has nothing to defragment"),
    ("--scheduling-policy=fcfs|priority", "requests with a priority go first, the others in their order"),
    ("--prefix-caching-hash-algo=", "blocks are identified by a cryptographic hash"),
    (
        "--max-num-partial-prefills= --max-long-partial-prefills= --threads-batch= -tb=",
        "this is decided for every step",
    ),
)

# Flags of every command that runs an engine: these are refused, and the sentence says what to do instead.
REFUSED: Lines = (
    ("--quant= --isq= --quantization= -q=", _NO_QUANTIZATION),
    ("--weight-file= --f= --hf-file= -hff= --gguf-file=", _NO_GGUF),
    ("--gpu-memory-utilization= --kv-fraction= --mem-fraction-static=", "a share of memory cannot be given yet; "
     "--kv-cache-memory sets the size of the KV cache, which takes most of the free memory by default"),
    ("--fp8-kvcache", "an fp8 KV cache is not supported yet; --kv-cache-dtype bfloat16 takes the least memory"),
    ("--cache-type-k= -ctk= --cache-type-v= -ctv=", "keys and values are stored alike; use --kv-cache-dtype, which "
     "takes float32, bfloat16 and float16"),
    ("--calculate-kv-scales --kv-cache-dtype-skip-layers=", "an fp8 KV cache is not supported yet"),
    ("--cpu-mem-fold= --cpu-offload-gb=0", "give --num-experts-offload-per-rank for experts and --swap-space for KV "
     "blocks; other weights are not offloaded yet"),
    ("--enable-expert-parallel --ep=", "every expert is split between the ranks, with --tensor-parallel-size"),
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
    ("--rpc= --tensor-split= -ts= --split-mode= -sm= --main-gpu= -mg=", "GPUs get equal parts, with "
     "--tensor-parallel-size; CUDA_VISIBLE_DEVICES selects them"),
    ("--n-gpu-layers=99|999|-1|all|auto --gpu-layers=99|999|-1|all|auto -ngl=99|999|-1|all|auto", _ONE_DEVICE),
    ("--hf-token= -hft=", "a token on the command line is seen by everybody on the machine; set HF_TOKEN"),
    ("--hf-token-path=", "set HF_TOKEN_PATH"),
    ("--download-dir= --cache-dir=", "set HF_HUB_CACHE to the directory"),
    ("--offline", "set HF_HUB_OFFLINE=1"),
    ("--tokenizer= --tokenizer-config= --tokenizer-revision= --hf-config-path= --code-revision= --skip-tokenizer-init",
     "tokenizer and config.json are the model's; copy the model's directory and change them there"),
    ("--hf-overrides= --override-kv=", "config.json sets this; copy the model's directory and change it there, or give "
     "--rope-scaling and --rope-theta if the override is for these"),
    ("--rope-scale= --rope-freq-scale= --yarn-scaling-factor= --yarn-orig-ctx=", "use --rope-scaling: "
     "JSON with rope_type, factor and original_max_position_embeddings"),
    ("--prefix-cache-max-tokens= --cache-ram= -cram=", "the prefix cache uses the free blocks of the KV cache; "
     "--kv-cache-memory, --swap-space and --kv-cache-disk set the sizes"),
    ("--cache-reuse= --context-shift --swa-full --slot-save-path=", "the prefix cache reuses whole prefixes, and "
     "--kv-cache-disk keeps them over restarts"),
    ("--mlock --numa=", "not supported yet; ulimit and numactl do it from outside"),
    ("--ubatch-size= -ub=", "--max-num-prefill-tokens limits the prompt tokens of a step beside running requests"),
    ("--speculative-config= --spec-type=", "use --speculative-method, --speculative-model and "
     "--num-speculative-tokens"),
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

# Flags of `serve` only.
SERVER_NOTED: Lines = (
    ("--server --server-mode --jinja", "that is what pagewick serve does"),
    ("--response-role=assistant", "the role is always assistant"),
    ("--disable-fastapi-docs", "there are no such pages"),
    (
        "--disable-uvicorn-access-log --disable-access-log",
        "each request is logged in one line; --no-log-requests turns this off",
    ),
    ("--enable-prompt-tokens-details", "usage always has them"),
    ("--disable-frontend-multiprocessing --api-server-count=1", "HTTP has a process of its own, the engine another"),
)
SERVER_REFUSED: Lines = (
    ("--temperature= --temp= --top-k= --top-p= --min-p= --penalty= --repeat-penalty= --repeat-last-n= "
     "--presence-penalty= --frequency-penalty=", "requests set it; the default is the model's, from "
     "generation_config.json in its directory"),
    ("--max-tokens= --max-gen-tokens= --max= --n-predict= --predict= -n=", "requests set max_tokens; without it a "
     "response may fill the context, which --max-model-len limits"),
    ("--generation-config=auto --override-generation-config=", "the default for requests is the model's, from "
     "generation_config.json in its directory"),
    ("--enable-auto-tool-choice --tool-call-parser= --tool-parser-plugin= --enforce-parser= --tool-prompt= "
     "--mcp-command= --mcp-args= --mcp-config= --tool-server=", _NO_TOOLS),
    ("--ssl-keyfile= --ssl-certfile= --ssl-ca-certs= --ssl-key-file= --ssl-cert-file=", "let a proxy such as nginx or "
     "Caddy speak TLS, and listen on 127.0.0.1"),
    ("--uds=", "a Unix socket is not supported yet; give --host and --port"),
    ("--root-path= --api-prefix= --path=", "let a proxy change paths"),
    ("--timeout= -to=", "use --request-timeout, --write-timeout or --keep-alive-timeout"),
    ("--middleware=", "nothing is loaded into the server; put a proxy before it"),
    ("--slots --props --models-dir= --models-max=", "not supported yet; one server serves one model"),
    ("--i --interactive -i -cnv --conversation", "pagewick chat talks in the terminal"),
    ("--prompts= --prompt= --batch=", "pagewick complete answers prompts, and pagewick bench measures"),
    ("--log-config-file= --max-log-len= --log-file=", "the log goes to stderr; --log-format, --log-level and "
     "--log-prompts control it"),
    ("--allowed-methods= --allowed-headers= --allow-credentials", "--allowed-origins is all that is needed"),
)  # fmt: skip

# Flags of `chat` and `complete`.
TERMINAL_NOTED: Lines = (("--i --interactive -i -cnv --conversation", "pagewick chat is a conversation"),)
TERMINAL_REFUSED: Lines = (
    ("--server", "pagewick serve is the server"),
    ("--system-prompt= -sys=", "pagewick chat takes --system"),
)


class ForeignOption(click.Option):
    """A hidden flag of another program, which is accepted with a note or refused.

    takes: how many values: none, one or none ("optional"), or one. harmless: the values that change nothing.
    """

    def __init__(self, text: str, sentence: str, *, is_refused: bool) -> None:
        self.flag, equals, values = text.partition("=")
        self.sentence = sentence
        self.is_refused = is_refused
        self.takes = "none" if not equals else "optional" if values.startswith("?") else "one"
        self.harmless = tuple(filter(None, values.removeprefix("?").split("|")))
        attributes: dict[str, dict[str, Any]] = {
            "none": {"is_flag": True},
            "optional": {"type": str, "is_flag": False, "flag_value": "on"},
            "one": {"type": str},
        }
        name = f"foreign{self.flag.replace('-', '_')}"
        super().__init__(
            [self.flag, name],
            default=None,
            hidden=True,
            expose_value=False,
            callback=self._tell,
            **attributes[self.takes],
        )

    def _tell(self, ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if not value or ctx.resilient_parsing:
            return
        if str(value) not in self.harmless if self.harmless else self.is_refused:
            raise click.UsageError(f"{self.flag}: {self.sentence}.", ctx)
        if not self.harmless:
            click.echo(f"note: {self.flag} changes nothing: {self.sentence}", err=True)


def foreign_options(*, is_server: bool, is_terminal: bool) -> list[ForeignOption]:
    """Return other programs' flags for a command: `serve`, `chat` or `complete` (is_terminal), or another one."""
    noted = NOTED + (SERVER_NOTED if is_server else ()) + (TERMINAL_NOTED if is_terminal else ())
    refused = REFUSED + (SERVER_REFUSED if is_server else ()) + (TERMINAL_REFUSED if is_terminal else ())
    return [
        ForeignOption(text, sentence, is_refused=lines is refused)
        for lines in (noted, refused)
        for flags, sentence in lines
        for text in flags.split()
    ]
