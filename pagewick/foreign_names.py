"""Names of vLLM, llama.cpp, candle-vllm and vllm.rs that have no field here: they are accepted with a note or refused.

The command line (cli/foreign_flags.py) and the Python API read the same lines; other_names.py has the names with a
field. docs/coming-from.md explains all of them to users; a test compares it with these tables.

A line consists of flags and a sentence. `--x` takes no value and `--x=` takes one. For `--x=1|auto`, the values 1 and
auto ask for what Pagewick does anyway and are accepted; others are refused. `--x=?on` takes one value or none, which
means "on". The argument in Python has the flag's name with underscores; None, False and empty values ask for nothing.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sized
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from pagewick.errors import ArgumentError, UnsupportedError
from pagewick.log import get_logger

Lines = tuple[tuple[str, str], ...]

_Class = TypeVar("_Class", bound=type)
_logger = get_logger(__name__)

_NO_SUCH_LORA = "LoRA adapters of experts and of encoders of images are not supported yet; merge them into the model"
_OWN_IMAGES = "a model's own settings decide how images are read; --max-image-pixels limits their size"
_NO_PLUGINS = "no code is loaded into the engine"

# Flags of every command that runs an engine: these are accepted, with a note.
NOTED: Lines = (
    ("--enable-chunked-prefill --no-enable-chunked-prefill --cont-batching -cb",
     "prompts are always computed in chunks, beside running requests"),
    ("--multi-process --multithread --distributed-executor-backend=", "every rank is always a process of its own"),
    ("--calculate-kv-scales", "every key and value is stored with a scale of its own"),
    ("--holding-time=", "requests are never held back: a new one joins the next step"),
    ("--trust-remote-code", "a model's code is never executed, and no supported model needs it"),
    ("--cudagraph-capture-sizes= --max-cudagraph-capture-size= --max-seq-len-to-capture= --cudagraph-metrics",
     "a CUDA graph of each size is captured when it is needed"),
    ("--compilation-config= -cc= --optimization-level= --performance-mode=", "there is nothing to compile"),
    ("--attention-config= --disable-cascade-attn --gdn-prefill-backend= --kda-prefill-backend= "
     "--kda-decode-backend=", "the device determines the attention kernel"),
    ("--flash-attn=?on|auto -fa=?on|auto", "the device determines the attention kernel; give on, auto or no value"),
    ("--moe-backend= --linear-backend= --sparse-indexer-topk-backend= --kernel-config= --ir-op-priority= "
     "--enable-flashinfer-autotune", "the device determines the kernels"),
    ("--no-mmap --mmap --safetensors-load-strategy= --safetensors-prefetch-num-threads= "
     "--safetensors-prefetch-block-size= --max-parallel-loading-workers= --pt-load-map-location= --use-tqdm-on-load",
     "weights are read through a memory map and copied"),
    ("--log --verbose -v", "the log is on; --log-level debug says more"),
    ("--enable-log-stats --disable-log-stats --aggregate-engine-logging --metrics --kv-cache-metrics "
     "--kv-cache-metrics-sample= --custom-histogram-buckets= --show-hidden-metrics-for-version= --enable-mfu-metrics "
     "--enable-logging-iteration-details --per-request-spec-decode-metrics=",
     "throughput is always logged and /metrics always served"),
    ("--no-context-shift", "the context is never shifted: a response ends when it is full"),
    ("--warmup --no-warmup", "there is nothing to warm up"),
    ("--load-format=auto|safetensors --ignore-patterns=original/**/* --model-loader-extra-config=",
     "the format follows from the files"),
    ("--disable-custom-all-reduce", "there is no custom all-reduce"),
    ("--tokenizer-mode=auto|hf|fast --config-format=auto|hf --model-impl=auto|vllm",
     "the model's files determine this"),
    ("--embedding --embeddings", "POST /v1/embeddings is always there"),
    ("--defrag-thold= -dt=", "a paged KV cache has nothing to defragment"),
    ("--scheduling-policy=fcfs|priority", "requests with a priority go first, the others in their order"),
    ("--prefix-caching-hash-algo=", "blocks are identified by a cryptographic hash"),
    ("--prefix-cache-retention-interval= --prefix-match-unit= --swa-bounded-replay --disable-hybrid-kv-cache-manager "
     "--kv-sharing-fast-prefill", "the layers' kinds of attention determine which blocks are kept"),
    ("--max-num-partial-prefills= --max-long-partial-prefills= --threads-batch= -tb= --async-scheduling "
     "--no-async-scheduling --long-prefill-token-threshold= --long-prefill-token-threshold-adaptive "
     "--scheduler-reserve-full-isl --prefill-schedule-interval= --watermark= --num-scheduler-steps= "
     "--num-lookahead-slots= --multi-step-stream-outputs --disable-async-output-proc --use-v2-block-manager "
     "--preemption-mode=", "this is decided for every step"),
    ("--skip-mm-profiling --mm-encoder-only --enable-mm-embeds --interleave-mm-strings "
     "--disable-chunked-mm-input --mm-processor-cache-gb= --mm-processor-cache-type= --mm-hasher-algorithm= "
     "--mm-shm-cache-max-object-size-mb= --mm-encoder-tp-mode= --mm-encoder-attn-backend= --mm-encoder-attn-dtype= "
     "--mm-encoder-fp8-scale-path= --mm-encoder-fp8-scale-save-path= --mm-encoder-fp8-scale-save-margin= "
     "--mm-tensor-ipc= --mm-processor-device= --mm-ipc-gpu-memory-gb= --mm-device-do-normalize "
     "--enable-mm-processor-stats --video-pruning-rate= --video-pruning-method= --media-io-kwargs= "
     "--mm-processor-kwargs=", _OWN_IMAGES),
    ("--allowed-media-domains=", "nothing is fetched for a request: images come as data: addresses"),
    ("--mamba-config= --mamba-cache-dtype= --mamba-ssm-cache-dtype= --mamba-block-size= --mamba-cache-mode= "
     "--enable-mamba-shared-prefix-checkpoint --replayssm-buffer-len= --use-replayssm --mamba-backend= "
     "--mamba-ssu-algorithm= --enable-mamba-cache-stochastic-rounding --mamba-cache-philox-rounds=",
     "a layer's states are float32 and lie in the KV cache; their size decides how far apart prompts share them"),
    ("--max-cpu-loras=", "adapters are loaded once, into the memory of the device: --max-loras limits their number"),
    ("--fully-sharded-loras --specialize-active-lora --max-lora-cls-labels=",
     "every rank holds its share of an adapter's larger factors, and steps without adapters skip them"),
    ("--enable-hc-sp --enable-batch-sharded-sampling --enable-shm-tensor-arena --enable-cumem-allocator "
     "--enable-nccl-comm-suspend --disable-nccl-for-dp-synchronization --dp-sync-interval= --ray-workers-use-nsight "
     "--jit-monitor-mode= --jit-monitor-verbose --enable-layerwise-nvtx-tracing --renderer-num-workers= "
     "--use-fp64-gumbel --cpu-offload-params= --offload-backend= --offload-num-in-group= --offload-prefetch-step= "
     "--offload-params= --expert-placement-strategy= --eplb-config= --elastic-ep-max-dp-size= --all2all-backend= "
     "--dbo-decode-token-threshold= --dbo-prefill-token-threshold= --data-parallel-backend= "
     "--fail-on-environ-validation", "it concerns a part of vLLM that Pagewick does not have"),
)  # fmt: skip

# Flags of every command that runs an engine: these are refused, and the sentence says what to do instead.
REFUSED: Lines = (
    ("--quantization-config= --allow-deprecated-quantization", "--quantization quantizes weights at load, to q4_k_m "
     "and others"),
    ("--kv-fraction=", "a share of the memory that is left cannot be given; --gpu-memory-utilization is a share of all "
     "memory, and --kv-cache-memory sets the size of the KV cache"),
    ("--cache-type-k= -ctk= --cache-type-v= -ctv=", "keys and values are stored alike; use --kv-cache-dtype, which "
     "takes float32, bfloat16, float16, int8, fp8_e4m3, fp8_e5m2 and int4"),
    ("--kv-cache-dtype-skip-layers=", "all layers keep their keys and values in the one --kv-cache-dtype"),
    ("--cpu-mem-fold= --cpu-offload-gb=0 --offload-group-size=0", "give --num-experts-offload-per-rank for experts and "
     "--swap-space for KV blocks; other weights are not offloaded yet"),
    ("--kv-offloading-backend=native", "--swap-space and --kv-cache-disk keep KV blocks, in ways of their own"),
    ("--enable-expert-parallel --ep= --enable-ep-weight-filter --enable-eplb --enable-elastic-ep --enable-dbo",
     "every expert is split between the ranks, with --tensor-parallel-size"),
    ("--n-cpu-moe=0 --cpu-moe --override-tensor= -ot=", "experts are kept in host memory by number, not by layer: give "
     "--num-experts-offload-per-rank"),
    ("--mamba-fraction=", "states of Mamba and the like take their memory from the KV cache as they are needed; "
     "--kv-cache-memory sets its size"),
    ("--lora-dtype=auto", "adapters have the data type of the model's activations: --dtype"),
    ("--lora-target-modules=", "an adapter changes all layers that it has factors for"),
    ("--default-mm-loras= --enable-tower-connector-lora --enable-mixed-moe-lora-format --enable-moe-shared-loras",
     _NO_SUCH_LORA),
    ("--lora-scaled=", "an adapter has the scale that it was trained with: change its lora_alpha, and give --lora"),
    ("--lora-dir=", "name each adapter: --lora-modules NAME=PATH"),
    ("--data-parallel-size=1 -dp=1 --data-parallel-rank= --data-parallel-start-rank= --data-parallel-size-local= "
     "--data-parallel-address= --data-parallel-rpc-port= --data-parallel-hybrid-lb --data-parallel-external-lb "
     "--data-parallel-multi-port-external-lb",
     "start one server per replica and a proxy before them"),
    ("--context-parallel-size=1 --prefill-context-parallel-size=1 --decode-context-parallel-size=1 -dcp=1 "
     "--dcp-comm-backend= --dcp-q-replicate --dcp-kv-cache-interleave-size=1 --cp-kv-cache-interleave-size=",
     "context parallelism is not supported yet; use --tensor-parallel-size"),
    ("--num-nodes=1 --nnodes=1 --node-rank=0 --master-addr=127.0.0.1 --master-port=29501 --headless", "several "
     "machines are started with torchrun, mpirun or Slurm: torchrun --nnodes 2 --nproc-per-node 8 -m pagewick serve "
     "..."),
    ("--distributed-timeout-seconds= --cpu-distributed-timeout-seconds= --enable-fault-tolerance "
     "--fault-tolerance-config=", "how long ranks wait for each other cannot be set yet"),
    ("--rpc= --tensor-split= -ts= --split-mode= -sm= --main-gpu= -mg=", "GPUs get equal parts, with "
     "--tensor-parallel-size; CUDA_VISIBLE_DEVICES selects them"),
    ("--hf-token= -hft=", "a token on the command line is seen by everybody on the machine; set HF_TOKEN"),
    ("--hf-token-path=", "set HF_TOKEN_PATH"),
    ("--download-dir= --cache-dir=", "set HF_HUB_CACHE to the directory"),
    ("--offline", "set HF_HUB_OFFLINE=1"),
    ("--tokenizer-config= --tokenizer-revision= --hf-config-path= --code-revision= --skip-tokenizer-init "
     "--tokens-only --model-weights= --model-class-overrides= --disable-sliding-window",
     "--tokenizer replaces the tokenizer, and config.json is the model's; copy the model's directory to change it"),
    ("--override-kv=", "config.json sets this; copy the model's directory and change it there, or give "
     "--rope-scaling and --rope-theta if the override is for these"),
    ("--rope-scale= --rope-freq-scale= --yarn-scaling-factor= --yarn-orig-ctx=", "use --rope-scaling: "
     "JSON with rope_type, factor and original_max_position_embeddings"),
    ("--prefix-cache-max-tokens= --cache-ram= -cram=", "the prefix cache uses the free blocks of the KV cache; "
     "--kv-cache-memory, --swap-space and --kv-cache-disk set the sizes"),
    ("--cache-reuse= --context-shift --swa-full --slot-save-path=", "the prefix cache reuses whole prefixes, and "
     "--kv-cache-disk keeps them over restarts"),
    ("--mlock --numa= --numa-bind --numa-bind-nodes= --numa-bind-cpus=",
     "not supported yet; ulimit and numactl do it from outside"),
    ("--ubatch-size=0 -ub=", "--max-num-prefill-tokens limits the prompt tokens of a step beside running requests"),
    ("--max-num-scheduled-tokens=", "--max-num-batched-tokens limits the tokens of a step"),
    ("--max-num-active-seqs=", "--max-num-seqs limits the sequences that run at the same time"),
    ("--max-logprobs=20", "a request gets at most 20 log-probabilities per token"),
    ("--logprobs-mode=raw_logprobs", "log-probabilities are those of the model, before temperature and penalties"),
    ("--mtp=?", "use --speculative-method mtp, and --num-speculative-tokens"),
    ("--kv-transfer-config= --pd-server --pd-client --pd-url= --pd-config= --pd-server-prefix-cache-ratio= "
     "--pd-client-prefix-cache-ratio=", "start both servers with --kv-cache-disk and --kv-cache-disk-shared, and the "
     "one that decodes with --prefill-url"),
    ("--ec-transfer-config= --ec-manager-config=", "images are always encoded by the server that answers"),
    ("--mmproj-url= -mmu=", "download the file, and give it with --mmproj"),
    ("--media-path= --allowed-local-media-path=", "no files are read for a request; send images as data: addresses"),
    ("--grammar= --grammar-file= --json-schema= -j=", "each request says which form its response has: send grammar or "
     "json_schema; pagewick complete has --json-schema"),
    ("--guided-decoding-backend=auto|guidance --structured-outputs-config=", "llguidance is the only backend of "
     "structured output"),
    ("--reasoning-parser-plugin= --worker-cls=auto --worker-extension-cls= --scheduler-cls= --logits-processors= "
     "--io-processor-plugin= --additional-config=", _NO_PLUGINS),
    ("--pooling= --pooler-config= --override-pooler-config=", "a request for embeddings says how they are made: send "
     "pooling (cls, last or mean), dimensions and normalize to POST /v1/embeddings"),
    ("--task=generate|auto|embed|embedding|score|classify --runner=generate|auto|pooling "
     "--convert=none|auto|embed|classify",
     "rewards are not supported yet; classifiers need no flag, rerankers none or --rerank"),
    ("--enable-return-routed-experts --return-sampling-mask --enable-trace-replay --enable-prompt-embeds "
     "--enable-sleep-mode --sleep-mode-offload-cudagraph --sleep-preserve-parameter-names= --weight-transfer-config= "
     "--kv-events-config= --watermark-config= --diffusion-config= --engram-config= --aux-output-config= "
     "--reasoning-config= --profiler-config= --collect-detailed-traces=", "it is not supported yet"),
)  # fmt: skip

# Arguments of vLLM's Python classes that `pagewick serve` has as flags of its own.
PYTHON_NOTED: Lines = (
    ("--served-model-name= --enable-log-requests --shutdown-timeout= --otlp-traces-endpoint= --reasoning-parser= "
     "--stream-interval=",
     "only a server has a use for it; pagewick serve has this flag"),
)  # fmt: skip
PYTHON_REFUSED: Lines = (
    ("--generation-config=auto --override-generation-config=", "the defaults are the model's, from "
     "generation_config.json in its directory; give SamplingParams to change them"),
    ("--log-level= --logging-config= --log-config-file=", 'set up logging.getLogger("pagewick") as any other logger'),
)  # fmt: skip

# Arguments of vLLM's SamplingParams.
SAMPLING_NOTED: Lines = (
    ("--detokenize=True", "the text is always there"),
    ("--flat-logprobs --skip-clone --output-text-buffer-length= --stream-interval=", "it changes no result"),
    ("--output-kind=0|2|CUMULATIVE|FINAL_ONLY", "outputs hold everything so far; LLM.stream yields only what is new"),
    ("--spaces-between-special-tokens=True", "the tokenizer determines the spaces"),
)  # fmt: skip
SAMPLING_REFUSED: Lines = (
    ("--guided-decoding=", "give structured_outputs=StructuredOutputsParams(...)"),
    ("--thinking-token-budget=-1", "give thinking_budget to LLM.chat, LLM.stream or AsyncEngine.generate"),
    ("--prompt-logprob-token-ids= --prompt-logprob-start= --logprob-token-ids=",
     "logprobs and prompt_logprobs are those of the most likely tokens; others are not supported yet"),
    ("--logits-processors= --extra-args=", f"{_NO_PLUGINS}; logit_bias, bad_words and allowed_token_ids change logits"),
    ("--skip-reading-prefix-cache", "give RequestOptions(cache_salt=...), which no other request has"),
    ("--repetition-detection=", "it is not supported yet; dry_multiplier makes repetitions unlikely"),
    ("--truncate-prompt-tokens=", "cut the list of token ids that is given as the prompt"),
    ("--watermarking --routed-experts-prompt-start=0 --trace-decode-token-ids=", "it is not supported yet"),
)  # fmt: skip

# Arguments of vLLM's LLM.generate and LLM.chat.
REQUEST_NOTED: Lines = (
    ("--chat-template-content-format=auto|string", "the template determines the form of messages"),
)  # fmt: skip
REQUEST_REFUSED: Lines = (
    ("--prompt-adapter-request=", "of adapters, only LoRA is supported: give a lora_request"),
    ("--mm-processor-kwargs=", _OWN_IMAGES),
    ("--tokenization-kwargs=", "encode the prompt with get_tokenizer() and give its token ids"),
    ("--prompt-token-ids=", "give token ids as the prompt"),
    ("--guided-options-request=", "give SamplingParams(structured_outputs=...)"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ForeignName:
    """A name, how a flag or an argument with it is treated, and why.

    takes: how many values the flag takes: none, one or none ("optional"), or one. harmless: the values that change
    nothing.
    """

    flag: str
    sentence: str
    is_refused: bool
    takes: str
    harmless: tuple[str, ...]

    @property
    def argument(self) -> str:
        return self.flag.lstrip("-").replace("-", "_")

    def verdict(self, value: object) -> str:
        """Return "" if a value changes nothing that one could notice, or else "noted" or "refused"."""
        if self.harmless:
            return "" if str(value) in self.harmless else "refused"
        return "refused" if self.is_refused else "noted"


def names_of(noted: Lines, refused: Lines) -> Iterator[ForeignName]:
    """Read the lines of two tables."""
    for lines in (noted, refused):
        for flags, sentence in lines:
            for text in flags.split():
                flag, equals, values = text.partition("=")
                takes = "none" if not equals else "optional" if values.startswith("?") else "one"
                harmless = tuple(filter(None, values.removeprefix("?").split("|")))
                yield ForeignName(flag, sentence, lines is refused, takes, harmless)


def _by_argument(noted: Lines, refused: Lines) -> dict[str, ForeignName]:
    return {name.argument: name for name in names_of(noted, refused)}


# Argument -> its ForeignName: arguments of EngineConfig.from_options, LLM and AsyncEngine; of SamplingParams; of
# requests.
ENGINE_ARGUMENTS = _by_argument(NOTED + PYTHON_NOTED, REFUSED + PYTHON_REFUSED)
SAMPLING_ARGUMENTS = _by_argument(SAMPLING_NOTED, SAMPLING_REFUSED)
REQUEST_ARGUMENTS = _by_argument(REQUEST_NOTED, REQUEST_REFUSED)


def check_argument(foreign: ForeignName, value: object, known: Collection[str]) -> str | None:
    """Note an argument that changes nothing; return why the value is refused, or None. known: our own arguments."""
    if value is None or (isinstance(value, Sized) and not value):
        return None
    if value is False and foreign.takes == "none":
        if f"no_{foreign.argument}" not in ENGINE_ARGUMENTS:
            return None
        value = True
    # An enumeration's value, or a number without decimal places.
    shown = getattr(value, "name", f"{value:g}" if isinstance(value, float) else value)
    verdict = foreign.verdict(shown)
    if not verdict:
        return None
    reason = re.sub(r"--([a-z][a-z-]*)", lambda match: _in_python(match[0], known), foreign.sentence)
    if verdict == "noted":
        note(foreign.argument, reason)
        return None
    return f"{foreign.argument}: {reason}"


def unknown_argument(name: str, known: Collection[str], others: Collection[str]) -> str:
    """Return the end of the error for an unknown argument: the most similar one, or all of ours."""
    near = difflib.get_close_matches(name, [*known, *others], n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def own_arguments(
    function: str, options: Mapping[str, Any], known: Collection[str], foreign: Mapping[str, ForeignName]
) -> dict[str, Any]:
    """Return the known arguments of a function of ours, and note or refuse vLLM's others.

    Raises UnsupportedError for one that is refused, and ArgumentError for an unknown one.
    """
    own = {name: value for name, value in options.items() if name in known}
    for name in options.keys() - own.keys():
        if name not in foreign:
            raise ArgumentError(f"{function} has no argument {name}; {unknown_argument(name, known, foreign)}")
        if reason := check_argument(foreign[name], options[name], known):
            raise UnsupportedError(reason, param=name)
    return own


def accepts_vllm_names(kind: _Class) -> _Class:
    """Let the constructor of a dataclass note or refuse the arguments in SAMPLING_ARGUMENTS; see own_arguments."""
    construct: Any = kind.__init__  # type: ignore[misc]
    known = [one.name for one in fields(kind)]

    @functools.wraps(construct)
    def __init__(self: object, *values: Any, **options: Any) -> None:
        construct(self, *values, **own_arguments(kind.__name__, options, known, SAMPLING_ARGUMENTS))

    kind.__init__ = __init__  # type: ignore[misc]
    return kind


def _in_python(flag: str, known: Collection[str]) -> str:
    """Return the name of our argument for one of our flags; other programs' flags stay as they are."""
    name = flag.removeprefix("--").replace("-", "_")
    return name if name in known else flag


@functools.cache
def note(name: str, reason: str) -> None:
    """Log once that an argument changes nothing: requests may come by the thousands."""
    _logger.warning("%s changes nothing: %s", name, reason)
