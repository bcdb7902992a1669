"""lm_eval_agreement.py FOLDER: compare lm-eval's measurements over HTTP with those of Pagewick's Python API.

FOLDER holds lm-eval's results and samples at any depth. Exits with 1 if anything differs.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pagewick import LLM, SamplingParams

# Log-probabilities are sums over some tens of tokens, computed in float32.
TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)

failed: list[str] = []


def check(what: str, is_so: bool, seen: object) -> None:
    if not is_so:
        failed.append(what)
    print(f"  {what}" if is_so else f"  FAILED: {what}: {seen}")


def check_close(what: str, seen: Iterable[float], wanted: Iterable[float]) -> None:
    pairs = list(zip(seen, wanted, strict=True))
    largest = max(abs(one - other) for one, other in pairs)
    check(f"{what}: {len(pairs)} values, none further off than {TOLERANCE}", largest <= TOLERANCE, pairs)


def encode(llm: LLM, text: str) -> list[int]:
    return llm.get_tokenizer().encode(text, add_special_tokens=False)


def likelihood(llm: LLM, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Return the sum of the continuation's log-probabilities, and whether each of its tokens is the likeliest."""
    (output,) = llm.generate(context + continuation, GREEDY)
    assert output.prompt_logprobs is not None
    rows = zip(continuation, output.prompt_logprobs[len(context) :], strict=True)
    logprobs = [row[token_id] for token_id, row in rows if row is not None]
    assert len(logprobs) == len(continuation)
    return math.fsum(each.logprob for each in logprobs), all(each.rank == 1 for each in logprobs)


def pair_likelihood(llm: LLM, context: str, continuation: str) -> tuple[float, bool]:
    """Return the likelihood of a text that is divided as lm-eval does: white space belongs to the continuation."""
    kept = len(context.rstrip())
    context, continuation = context[:kept], context[kept:] + continuation
    start, whole = encode(llm, context), encode(llm, context + continuation)
    return likelihood(llm, start, whole[len(start) :])


def arguments(samples: list[Any]) -> list[list[list[Any]]]:
    """Return the requests of each sample, each as a list of its arguments."""
    return [[list(request.values()) for request in sample["arguments"].values()] for sample in samples]


def compare_likelihood(llm: LLM, samples: list[Any], scores: Any) -> None:
    wanted = [pair_likelihood(llm, *request) for (request,) in arguments(samples)]
    seen = [sample["resps"][0][0] for sample in samples]
    check_close("loglikelihood", [float(logprob) for logprob, _ in seen], [logprob for logprob, _ in wanted])
    check("is_greedy", [flag == "True" for _, flag in seen] == [flag for _, flag in wanted], seen)
    perplexity = math.exp(-statistics.fmean(logprob for logprob, _ in wanted))
    check("perplexity", math.isclose(scores["perplexity,none"], perplexity, rel_tol=TOLERANCE), (scores, perplexity))
    check("acc", scores["acc,none"] == statistics.fmean(flag for _, flag in wanted), scores)


def compare_rolling(llm: LLM, samples: list[Any], scores: Any) -> None:
    # lm-eval puts an end-of-text token before a text if the tokenizer has no beginning-of-text token.
    before = encode(llm, "<|im_end|>")
    assert len(before) == 1
    wanted = [likelihood(llm, before, encode(llm, request[0]))[0] for (request,) in arguments(samples)]
    check_close("loglikelihood_rolling", [float(sample["resps"][0][0]) for sample in samples], wanted)
    num_words = sum(len(request[0].split()) for (request,) in arguments(samples))
    perplexity = math.exp(-math.fsum(wanted) / num_words)
    check("word_perplexity", math.isclose(scores["word_perplexity,none"], perplexity, rel_tol=TOLERANCE), scores)


def compare_choices(llm: LLM, samples: list[Any], scores: Any) -> None:
    wanted = [[pair_likelihood(llm, *request) for request in requests] for requests in arguments(samples)]
    seen = [float(response[0][0]) for sample in samples for response in sample["resps"]]
    check_close("multiple_choice", seen, [logprob for choices in wanted for logprob, _ in choices])
    labels = [max(range(len(choices)), key=lambda label: choices[label][0]) for choices in wanted]
    right = [label == sample["doc"]["label"] for label, sample in zip(labels, samples, strict=True)]
    check("acc of multiple_choice", scores["acc,none"] == statistics.fmean(right), (scores, right))


def compare_generated(llm: LLM, samples: list[Any], scores: Any) -> None:
    conversations = [[{"role": "user", "content": sample["doc"]["question"]}] for sample in samples]
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=40, stop=["."]))
    wanted = [output.outputs[0].text for output in outputs]
    check("generate_until", [sample["resps"][0][0] for sample in samples] == wanted, (samples, wanted))
    right = [text == sample["target"] for text, sample in zip(wanted, samples, strict=True)]
    check("exact_match", scores["exact_match,none"] == statistics.fmean(right) and any(right), (scores, right))


COMPARE = {
    "pagewick_answers": compare_generated, "pagewick_choices": compare_choices,
    "pagewick_likelihood": compare_likelihood, "pagewick_rolling": compare_rolling,
}  # fmt: skip


def main(folder: Path) -> int:
    results: dict[str, Any] = {}
    for path in folder.rglob("results_*.json"):
        results |= json.loads(path.read_text(encoding="utf-8"))["results"]
    check("every task has results", results.keys() == COMPARE.keys(), sorted(results))
    with LLM(dtype="float32") as llm:
        for task, compare in COMPARE.items():
            (path,) = folder.rglob(f"samples_{task}_*.jsonl")
            samples = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            compare(llm, sorted(samples, key=lambda sample: int(sample["doc_id"])), results[task])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
