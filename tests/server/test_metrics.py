"""The metrics that vLLM's dashboards ask for, and that a request's label never gets in."""

from __future__ import annotations

import httpx
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from pagewick.engine.messages import EngineStats
from tests.fake_engine import NAN_ROW
from tests.server.conftest import MODEL, Server

GAUGES = {
    "num_requests_running", "num_requests_waiting", "num_waiting_tokens", "oldest_wait_s", "num_blocks",
    "num_free_blocks", "num_cached_blocks", "num_referenced_blocks", "num_session_blocks", "num_host_blocks",
    "num_disk_blocks", "num_leaked_blocks", "num_sessions",
}  # fmt: skip


def scrape(http: httpx.Client) -> dict[str, float]:
    """Samples by name, those of finished_reason by name and reason."""
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            assert sample.labels["model_name"] == MODEL
            samples[sample.name + sample.labels.get("finished_reason", "")] = sample.value
    return samples


def test_engine_counts(server: Server, http: httpx.Client) -> None:
    samples = scrape(http)
    assert samples["vllm:num_requests_running"] == samples["vllm:num_requests_waiting"] == 0
    assert samples["vllm:kv_cache_usage_perc"] == 0.05
    assert samples["pagewick:kv_blocks_referenced"] == 5 and samples["pagewick:kv_blocks_free"] == 40
    assert samples["vllm:prompt_tokens_total"] == 7
    for name in ("generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions"):
        assert samples[f"vllm:{name}_total"] == 0
    for name in ("draft", "accepted"):
        assert samples[f"vllm:spec_decode_num_{name}_tokens_total"] == 0
    assert samples["pagewick:kv_blocks_leaked"] == samples["pagewick:sessions"] == 0
    assert samples["vllm:cache_config_info"] == 1
    assert 'block_size="16"' in http.get("/metrics").text and 'num_gpu_blocks="100"' in http.get("/metrics").text


def test_every_count_of_the_engine_is_shown(server: Server, http: httpx.Client) -> None:
    """Whichever of them changes, some sample does; and of what can fall none is a counter."""
    client = server.engine_client
    before, stats = scrape(http), client.stats
    try:
        for field in structs.fields(EngineStats):
            client.stats = structs.replace(stats, **{field.name: 1_000_003})
            changed = {name for name, value in scrape(http).items() if value != before.get(name)}
            assert changed, field.name
            assert all(name.endswith("_total") for name in changed) == (field.name not in GAUGES), field.name
    finally:
        client.stats = stats


def test_requests_are_counted_and_timed(server: Server, http: httpx.Client) -> None:
    before = scrape(http)
    body = {"messages": [{"role": "user", "content": "x"}], "n": 2}
    http.post("/v1/chat/completions", json=body)
    http.post("/v1/chat/completions", json={**body, "max_tokens": 1, "stream": True})
    http.post("/v1/completions", json={"prompt": "x", "stop": "e"})
    after = scrape(http)
    grown = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert grown["vllm:request_success_totalstop"] == 3
    assert grown["vllm:request_success_totallength"] == 2
    assert grown["vllm:e2e_request_latency_seconds_count"] == 5
    assert grown["vllm:time_to_first_token_seconds_count"] == 5
    assert grown["vllm:inter_token_latency_seconds_count"] == 11 + 11 + 1


def test_aborts_and_errors_are_counted(server: Server, http: httpx.Client) -> None:
    before = scrape(http)
    server.engine_client.pause_at = 1
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        next(response.iter_lines())
    server.until(lambda: len(server.engine_client.aborted) == 1)
    server.engine_client.failure = NAN_ROW
    http.post("/v1/chat/completions", json=body)
    server.until(
        lambda: scrape(http)["vllm:request_success_totalabort"] == before["vllm:request_success_totalabort"] + 1
    )
    assert scrape(http)["vllm:request_success_totalerror"] == before["vllm:request_success_totalerror"] + 1


def test_labels_do_not_grow_with_requests(http: httpx.Client) -> None:
    before = scrape(http).keys()
    for i in range(20):
        http.post("/v1/chat/completions", json={"model": f"model-{i}", "messages": [{"role": "user", "content": "x"}]})
        http.get(f"/v1/path-{i}")
    assert scrape(http).keys() == before
