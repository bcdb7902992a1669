"""`python -m benchmarks.queue_cost`: the processor time of a request, by the number of those that wait and are cached.

The scheduler and the block manager serve requests without a model: every sampled token is the same. A request is added,
waits, starts, and is finished by its first token. Its cost must not depend on how many others wait. The cost of looking
for a prefix, and of saying where a prompt differs from the closest one, must not depend on how many blocks are cached.
"""

from __future__ import annotations

import gc
import time
from array import array
from random import Random

import click

from pagewick.attention.cache_spec import CacheSpec
from pagewick.engine.batch import SlotResult, StepOutput, StepPlan, StreamResults
from pagewick.engine.cache.block_manager import BlockManager
from pagewick.engine.messages import EngineRequest, RequestOptions
from pagewick.engine.scheduling.queue_limits import QueueLimits
from pagewick.engine.scheduling.scheduler import Scheduler
from pagewick.engine.sequence import Request, Sequence
from pagewick.engine_process import GC_THRESHOLDS
from pagewick.sampling_params import SamplingParams

BLOCK_SIZE = 16
NUM_PROMPT_TOKENS = 40
MAX_NUM_SEQS = 64
# Requests whose service is timed, while as many others wait as before.
NUM_SERVED = 10_000
NUM_LOOKED_UP = 2_000
# Blocks of each cached prompt.
CHAIN_LENGTH = 50

SPEC = CacheSpec(kind="full", block_size=BLOCK_SIZE, block_bytes=BLOCK_SIZE)


def scheduler_of(num_blocks: int) -> tuple[Scheduler, BlockManager]:
    blocks = BlockManager([SPEC], [num_blocks], hash_key=b"key", enable_prefix_caching=True)
    scheduler = Scheduler(
        blocks,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=8192,
        max_model_len=4096,
        eos_token_ids=(),
        limits=QueueLimits(max_requests=10**7),
    )
    return scheduler, blocks


def request(number: int, random: Random, num_keys: int) -> EngineRequest:
    return EngineRequest(
        request_id=str(number),
        prompt_token_ids=random.choices(range(100_000), k=NUM_PROMPT_TOKENS),
        params=SamplingParams(max_tokens=1),
        seed=number,
        options=RequestOptions(fairness_key=str(number % num_keys), timeout_s=3600.0),
    )


def output_of(plan: StepPlan) -> StepOutput:
    results = [SlotResult(token_ids=[7] if work.is_sampled else []) for work in plan.work]
    return StepOutput(results, streams=StreamResults([7] * len(plan.streams.slots)))


def queue_cost(num_waiting: int, num_keys: int) -> tuple[float, float]:
    """Return the seconds of adding a request, and of serving one and adding another while `num_waiting` wait."""
    random = Random(num_waiting)
    scheduler, _ = scheduler_of(num_blocks=100_000)
    requests = [request(number, random, num_keys) for number in range(num_waiting)]
    others = [request(num_waiting + number, random, num_keys) for number in range(NUM_SERVED + MAX_NUM_SEQS)]
    gc.collect()
    started = time.process_time()
    for each in requests:
        scheduler.add(each)
    added = time.process_time()
    num_finished = 0
    while num_finished < NUM_SERVED:
        step = scheduler.schedule()
        assert step is not None
        for delta in scheduler.update(output_of(step.plan)):
            assert delta.finish_reason is not None
            scheduler.add(others.pop())
            num_finished += 1
        scheduler.refresh_stats()
    served = time.process_time()
    return (added - started) / num_waiting, (served - added) / num_finished


def sequence(token_ids: list[int], number: int) -> Sequence:
    asked = EngineRequest(request_id=str(number), prompt_token_ids=token_ids, params=SamplingParams(), seed=0)
    return Sequence(Request(asked, number, 0.0, None, frozenset(), 1), 0, list(token_ids))


def lookup_cost(num_blocks: int) -> tuple[float, float]:
    """Return the seconds of finding a prompt's prefix among cached blocks, and of caching a prompt of CHAIN_LENGTH."""
    random = Random(num_blocks)
    _, blocks = scheduler_of(num_blocks + CHAIN_LENGTH)
    prompts: list[array[int]] = []
    started = time.process_time()
    for number in range(num_blocks // CHAIN_LENGTH):
        prompts.append(array("i", random.choices(range(100_000), k=CHAIN_LENGTH * BLOCK_SIZE)))
        seq = sequence(prompts[-1].tolist(), number)
        blocks.adopt_prefix(seq, 0)
        blocks.allocate(seq, seq.num_tokens)
        blocks.mark_computed(seq, seq.num_tokens)
        blocks.free(seq)
    cached = time.process_time()
    wanted = []
    for number in range(NUM_LOOKED_UP):
        # Half of a cached prompt, and an end of its own.
        half = random.choice(prompts)[: CHAIN_LENGTH // 2 * BLOCK_SIZE]
        wanted.append(sequence([*half, *random.choices(range(100_000), k=BLOCK_SIZE)], number))
    gc.collect()
    began = time.process_time()
    for seq in wanted:
        blocks.explain_miss(seq, blocks.find_prefix(seq))
    return (time.process_time() - began) / len(wanted), (cached - started) / len(prompts)


def show(title: str, numbers: list[int], rows: dict[str, list[float]]) -> None:
    click.echo(f"\n{title:44}" + "".join(f"{number:>12,}" for number in numbers) + "       ratio")
    for name, seconds in rows.items():
        ratio = seconds[-1] / seconds[0]
        click.echo(f"{name:44}" + "".join(f"{each * 1e6:12.1f}" for each in seconds) + f"{ratio:12.2f}")


@click.command()
@click.option("--waiting", type=int, multiple=True, default=(1_000, 100_000), show_default=True)
@click.option("--blocks", type=int, multiple=True, default=(1_000, 1_000_000), show_default=True)
@click.option("--keys", type=click.IntRange(1), default=10, show_default=True, help="fairness keys")
def main(waiting: tuple[int, ...], blocks: tuple[int, ...], keys: int) -> None:
    """Microseconds of processor time per request."""
    gc.set_threshold(*GC_THRESHOLDS)
    costs = [queue_cost(number, keys) for number in waiting]
    adding, serving = zip(*costs, strict=True)
    show(
        "requests that wait",
        [*waiting],
        {"add a request": [*adding], "start and finish one, and add another": [*serving]},
    )
    looking, caching = zip(*map(lookup_cost, blocks), strict=True)
    show("cached blocks", [*blocks], {"find a prefix": [*looking], "cache a prompt of 50 blocks": [*caching]})


if __name__ == "__main__":
    main()
