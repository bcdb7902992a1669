"""OpenVINO GenAI as a contestant: `python benchmarks/peer_openvino.py MODEL THREADS STREAMS LENGTH`.

It runs with the Python of a virtual environment that has openvino-genai and optimum-intel, and without Pagewick: this
file imports nothing of ours. As benchmarks/peer.py has it, it writes its name, then a timing for every line with a
scenario. One stream runs in an LLMPipeline, several in a ContinuousBatchingPipeline, its fastest ways.
"""

import json
import sys
import time
from typing import Any

CACHE_GIB = 2
FIRST_ID, LAST_ID = 300, 5000


def main() -> None:
    import numpy
    import openvino
    import openvino_genai as genai

    model, num_threads, num_streams, max_len = sys.argv[1], *map(int, sys.argv[2:5])
    options = {"INFERENCE_NUM_THREADS": num_threads, "PERFORMANCE_HINT": "LATENCY"}
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.enable_prefix_caching = CACHE_GIB, num_streams, False
    scheduler.max_num_batched_tokens = max_len
    one, many = genai.LLMPipeline(model, "CPU", **options), None

    def random_ids(scenario: dict[str, Any], seed: int) -> list[Any]:
        random = numpy.random.default_rng(seed)
        size = (scenario["num_streams"], 1, scenario["num_prompt_tokens"])
        return [openvino.Tensor(ids) for ids in random.integers(FIRST_ID, LAST_ID, size)]

    def settings(num_tokens: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_tokens
        config.ignore_eos, config.do_sample = True, False
        return config

    def run_one(scenario: dict[str, Any], seed: int) -> list[float]:
        """Return the time of each token, the time of the request first."""
        times: list[float] = []

        class Stopwatch(genai.StreamerBase):  # type: ignore[misc]
            def write(self, token: object) -> Any:
                times.append(time.perf_counter())
                return genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        (ids,) = random_ids(scenario, seed)
        mask = openvino.Tensor(numpy.ones(ids.shape, numpy.int64))
        times.append(time.perf_counter())
        one.generate(genai.TokenizedInputs(ids, mask), settings(scenario["num_output_tokens"]), Stopwatch())
        return times

    def run_many(scenario: dict[str, Any], seed: int) -> list[float]:
        """Return the time of each step, the time of the requests first."""
        nonlocal many
        if many is None:
            many = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options)
        prompts = random_ids(scenario, seed)
        times = [time.perf_counter()]
        requests = [
            many.add_request(index, ids, settings(scenario["num_output_tokens"])) for index, ids in enumerate(prompts)
        ]
        while many.has_non_finished_requests():
            many.step()
            times.append(time.perf_counter())
        found = [len(output.generated_ids) for request in requests for output in request.read_all()]
        assert found == [scenario["num_output_tokens"]] * len(prompts), found
        return times

    print(json.dumps({"name": f"OpenVINO GenAI {genai.__version__.split('-')[0]}"}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        scenario = request["scenario"]
        times = (run_one if scenario["num_streams"] == 1 else run_many)(scenario, request["seed"])
        num_later = scenario["num_streams"] * (scenario["num_output_tokens"] - 1)
        seconds = {"first_token_seconds": times[1] - times[0], "total_seconds": times[-1] - times[0]}
        print(json.dumps({**seconds, "num_tokens_later": num_later}), flush=True)


if __name__ == "__main__":
    main()
