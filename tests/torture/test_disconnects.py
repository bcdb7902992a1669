"""Books under a mixed load of which a third leaves: clients, log and /metrics tell the same story of every request."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.torture.http_client import DEADLINE_S, Address, Answer, Connection, head
from tests.torture.serving import CHAT, COMPLETIONS, MODEL, Finished, Server

NUM_CLIENTS = 12
CI_S, DEEP_S = 8.0, 60.0
LEAVING_SHARE = 0.3
# Where a client leaves: before its headers are complete, amid its body, before it has heard anything, amid the answer.
LEAVES = ("head", "body", "prefill", "stream")
# The engine's words, the worst first: what a request with several choices ends as.
REASONS = ("error", "abort", "length", "stop")


@dataclass
class Entry:
    """One request in the clients' ledger. leaves: one of LEAVES, or "" for a client that stays."""

    request_id: str
    kind: str
    path: str
    body: bytes
    leaves: str
    patience_s: float
    num_events: int
    answer: Answer | None = None

    @property
    def is_generation(self) -> bool:
        return self.kind in ("chat", "completion")


def draw(random: Random, request_id: str) -> Entry:
    kind = random.choices(["chat", "completion", "tokenize", "bad"], [40, 30, 15, 15])[0]
    path, fields = request_of(random, kind)
    leaves = random.choice(LEAVES) if random.random() < LEAVING_SHARE else ""
    if leaves and kind in ("chat", "completion"):
        # Long enough not to be over before the client leaves.
        fields |= {"max_tokens": 1200, "ignore_eos": True}
    body = (
        b"{" + json.dumps(fields).encode() if kind == "bad" and random.random() < 0.5 else json.dumps(fields).encode()
    )
    if leaves == "stream" and not fields.get("stream"):
        leaves = "prefill"
    return Entry(request_id, kind, path, body, leaves, random.uniform(0, 0.2), random.randint(1, 5))


def request_of(random: Random, kind: str) -> tuple[str, dict[str, Any]]:
    words = " ".join(
        random.choice(["port", "server", "Pagewick", "why", "token", "7"]) for _ in range(random.randint(1, 60))
    )
    match kind:
        case "chat":
            usage = {"include_usage": True}
            message = {"role": "user", "content": words}
            return CHAT, {
                "messages": [message],
                "stream": True,
                "stream_options": usage,
                "max_tokens": random.randint(1, 24),
            }
        case "completion":
            n, stream = random.randint(1, 4), random.random() < 0.3
            usage = {"stream_options": {"include_usage": True}} if stream else {}
            fields = {"prompt": words, "n": n, "max_tokens": random.randint(1, 16), "stream": stream}
            return COMPLETIONS, {"model": MODEL, **fields, **usage}
        case "tokenize":
            return "/tokenize", {"prompt": words}
    wrong = {"max_tokens": -1, "n": 0, "model": "no/such-model", "temperature": "hot", "messages": 7}
    name = random.choice(list(wrong))
    return CHAT, {"messages": [{"role": "user", "content": words}], name: wrong[name]}


async def carry_out(address: Address, entry: Entry) -> None:
    async with asyncio.timeout(DEADLINE_S), await Connection.open(address) as connection:
        first = head("POST", entry.path, address, len(entry.body), {"x-request-id": entry.request_id})
        cut = {"head": first[:-3], "body": first + entry.body[: len(entry.body) // 2]}
        connection.writer.write(cut.get(entry.leaves, first + entry.body))
        await connection.writer.drain()
        if not entry.leaves:
            entry.answer = await connection.read()
        elif entry.leaves == "stream":
            entry.answer = await connection.read(num_events=entry.num_events)
        else:
            with contextlib.suppress(TimeoutError):
                # What comes meanwhile is not read, and so not known.
                await asyncio.sleep(entry.patience_s)


async def run_load(address: Address, seed: int, seconds: float) -> list[Entry]:
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    ledger: list[Entry] = []

    async def client(number: int) -> None:
        random = Random(f"{seed}-{number}")
        while loop.time() < until:
            entry = draw(random, f"t{seed}-{number}-{len(ledger)}")
            ledger.append(entry)
            await carry_out(address, entry)

    await asyncio.gather(*(client(number) for number in range(NUM_CLIENTS)))
    return ledger


def usage_of(answer: Answer) -> dict[str, int]:
    parts = answer.chunks if answer.events else [answer.json()]
    (usage,) = [part["usage"] for part in parts if part.get("usage")]
    return dict(usage)


def check_one(entry: Entry, finished: list[Finished], refused: list[int]) -> None:
    """What the client knows of its request is what the log says of it."""
    answer = entry.answer
    if entry.leaves in ("head", "body"):
        assert not finished and not refused
    elif entry.leaves == "prefill":
        # It may have been over before the client left, or not have been begun. Bad ones may have been answered.
        assert len(finished) + len(refused) <= 1
        assert not refused or entry.kind == "bad"
    elif answer is not None and entry.is_generation:
        assert answer.status == 200
        (one,) = finished
        assert not refused
        if answer.is_whole:
            reasons = answer.finish_reasons.values()
            usage = usage_of(answer)
            assert one.reason == next(reason for reason in REASONS if reason in reasons)
            assert (one.num_prompt_tokens, one.num_generated) == (usage["prompt_tokens"], usage["completion_tokens"])
            assert not answer.events or answer.events[-1] == "[DONE]"
        else:
            assert one.reason == "abort"
    elif answer is not None:
        assert answer.is_whole and not finished
        assert answer.status == (
            200
            if entry.kind == "tokenize"
            else 404
            if entry.body.startswith(b'{"') and b"no/such" in entry.body
            else 400
        )
        assert refused == ([] if answer.status == 200 else [answer.status])
        assert answer.status == 200 or answer.error


def expected_statuses(ledger: list[Entry]) -> tuple[Counter[str], int]:
    """Of those whose end their clients know, how many there are of each; and how many left in the dark."""
    known: Counter[str] = Counter()
    num_unknown = 0
    for entry in ledger:
        if entry.leaves == "body":
            known["499"] += 1
        elif entry.leaves == "prefill":
            num_unknown += 1
        elif entry.answer is not None:
            known[str(entry.answer.status)] += 1
    return known, num_unknown


def test_every_request_is_in_the_books_once(server: Server, seed: int, is_deep: bool) -> None:
    before = server.figures()
    ledger = asyncio.run(run_load(server.address, seed, DEEP_S if is_deep else CI_S))
    after = server.wait_until_idle()
    finished, refused = server.requests_in_log(f"t{seed}-")
    for entry in ledger:
        try:
            check_one(entry, finished.get(entry.request_id, []), refused.get(entry.request_id, []))
        except AssertionError as error:
            raise AssertionError(
                f"{entry}: {finished.get(entry.request_id)}, {refused.get(entry.request_id)}"
            ) from error
    assert {*finished, *refused} <= {entry.request_id for entry in ledger}

    ends = [one for ones in finished.values() for one in ones]
    assert after.accepted - before.accepted == len(ends)
    assert after.finished - before.finished == Counter(one.reason for one in ends)
    name = "vllm:request_generation_tokens_sum"
    assert after[name] - before[name] == sum(one.num_generated for one in ends)

    known, num_unknown = expected_statuses(ledger)
    seen = after.statuses - before.statuses
    assert set(seen) <= {"200", "400", "404", "499"}
    assert not known - seen
    assert (seen - known).total() == num_unknown
    left = Counter(entry.leaves for entry in ledger)
    assert all(left[one] for one in LEAVES), "the load was too short to say anything"
    print(
        f"{len(ledger)} requests, left: {dict(left)}, ended: {dict(Counter(one.reason for one in ends))}, {dict(seen)}"
    )
    assert server.troubles() == []
