"""/metrics: vLLM's names, and figures that are true."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_rig import NAME, USER, ServerRig, says, serving

from cb_engine import EngineConfig

CHAT: dict[str, Any] = {"model": NAME, "messages": USER, "temperature": 0, "max_tokens": 5}

NAMES = {
    "gauge": ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    "counter": (
        *("vllm:num_preemptions", "vllm:prompt_tokens", "vllm:generation_tokens", "vllm:request_success"),
        *("vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:admission_rejections"),
        *("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens"),
        *("vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_accepted_tokens_per_pos"),
    ),
    "histogram": (
        *("vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds"),
        *("vllm:request_time_per_output_token_seconds", "vllm:request_queue_time_seconds"),
        *("vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds", "vllm:request_prompt_tokens"),
        *("vllm:request_generation_tokens", "vllm:request_params_max_tokens", "vllm:request_params_n"),
        *("vllm:iteration_tokens_total",),
    ),
}


def read(rig: ServerRig) -> dict[str, float]:
    """All samples by name, with the labels that tell them apart."""
    found = {}
    for family in text_string_to_metric_families(rig.get("/metrics").text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name + (f"{labels}" if labels else "")] = sample.value
    return found


@pytest.fixture
def rig() -> Iterator[ServerRig]:
    with serving(says("x" * 450), config=EngineConfig(block_size=4, num_blocks=64)) as made:
        yield made


@pytest.mark.parametrize("kind", NAMES)
def test_dashboards_find_vllms_names(rig: ServerRig, kind: str):
    rig.post("/v1/chat/completions", CHAT)
    families = {f.name: f.type for f in text_string_to_metric_families(rig.get("/metrics").text)}
    assert {name: families.get(name) for name in NAMES[kind]} == dict.fromkeys(NAMES[kind], kind)


def test_every_sample_tells_the_model(rig: ServerRig):
    for family in text_string_to_metric_families(rig.get("/metrics").text):
        for sample in family.samples:
            if family.name.startswith("vllm:"):
                assert sample.labels["model_name"] == NAME


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_requests_are_counted_once(rig: ServerRig, stream: bool):
    before = read(rig)
    rig.post("/v1/chat/completions", {**CHAT, "n": 2, "stream": stream})
    rig.wait_until_idle()
    after = read(rig)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    prompt = len("<user>Hi\n<assistant>")
    assert grown["vllm:request_success_total{'finished_reason': 'length'}"] == 2
    assert grown["vllm:request_success_total{'finished_reason': 'abort'}"] == 0
    assert grown["vllm:prompt_tokens_total"] == 2 * prompt
    assert grown["vllm:generation_tokens_total"] == 10
    assert grown["vllm:prefix_cache_queries_total"] == 2 * prompt
    assert grown["vllm:time_to_first_token_seconds_count"] == 2
    assert grown["vllm:inter_token_latency_seconds_count"] == 8
    assert grown["vllm:request_time_per_output_token_seconds_count"] == 2
    assert grown["vllm:request_generation_tokens_sum"] == 10
    assert grown["vllm:request_prompt_tokens_sum"] == 2 * prompt
    assert grown["vllm:request_params_n_sum"] == 2
    assert grown["vllm:request_params_max_tokens_sum"] == 5
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert grown[f"vllm:{name}_seconds_count"] == 2
    parts = sum(grown[f"vllm:request_{name}_time_seconds_sum"] for name in ("queue", "prefill", "decode"))
    assert parts == pytest.approx(grown["vllm:e2e_request_latency_seconds_sum"], abs=0.05)
    assert grown["cb_engine:http_responses_total{'status': '200'}"] >= 1


def test_steps_are_counted_by_their_size(rig: ServerRig):
    rig.post("/v1/chat/completions", CHAT)
    found = read(rig)
    assert found["vllm:iteration_tokens_total_count"] == found["cb_engine:steps_total"]
    assert found["vllm:iteration_tokens_total_sum"] == len("<user>Hi\n<assistant>") + 4
    assert found["vllm:iteration_tokens_total_bucket{'le': '1.0'}"] == found["cb_engine:steps_total"] - 1


def test_a_full_prefix_cache_is_no_leak(rig: ServerRig):
    rig.post("/v1/chat/completions", CHAT)
    rig.wait_until_idle()
    found = read(rig)
    assert found["vllm:kv_cache_usage_perc"] == 0
    assert found["cb_engine:kv_blocks_live"] == 0
    assert found["cb_engine:kv_blocks_cached"] > 0
    assert (
        found["cb_engine:kv_blocks_cached"] + found["cb_engine:kv_blocks_free"]
        == rig.stats().free_blocks + rig.stats().cached_blocks
    )


def test_two_servers_in_one_process_do_not_share_figures(rig: ServerRig):
    with serving() as other:
        other.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert read(other)["vllm:generation_tokens_total"] == 1
    assert read(rig)["vllm:generation_tokens_total"] == 0
