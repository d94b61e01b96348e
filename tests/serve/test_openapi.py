"""The published description, and that nothing it allows makes the server fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from server_rig import ServerRig, serving

from cb_engine import EngineConfig
from cb_engine.serve.routes import BODIES

NUM_EXAMPLES = 60  # of each route; the slow test has more


@pytest.fixture(scope="module")
def rig() -> Iterator[ServerRig]:
    config = EngineConfig(block_size=16, num_blocks=256, max_model_len=64)
    with serving(config=config, admin_key="secret", trust_request_chat_template=True) as made:
        yield made


def test_the_description_holds_all_bodies(rig: ServerRig):
    document = rig.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert {body.__name__ for body in BODIES} <= schemas.keys()
    chat = document["paths"]["/v1/chat/completions"]["post"]
    reference = chat["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert reference == "#/components/schemas/ChatRequest"
    assert schemas["ChatRequest"]["additionalProperties"] is False
    assert schemas["ChatRequest"]["properties"]["messages"]["minItems"] == 1
    assert {"400", "401", "429", "503"} <= chat["responses"].keys()


HEADERS = {"authorization": "Bearer secret"}


def fuzz(rig: ServerRig, num_examples: int) -> list[str]:
    """Asks each route for what the description allows; returns how the server failed."""
    schema = schemathesis.openapi.from_url(f"{rig.url}/openapi.json")
    failures: list[str] = []

    def ask(case: Any) -> None:
        response = case.call(base_url=rig.url, headers=HEADERS, timeout=60)
        if response.status_code >= 500:
            failures.append(f"{case.method} {case.path} {case.body!r:.300} -> {response.status_code}")
        elif response.status_code >= 400:
            assert set(response.json()) == {"error"}, case.path

    bounded = settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for operation in schema.get_all_operations():
        made: Any = operation.ok()
        bounded(given(case=made.as_strategy())(ask))()
        rig.post("/resume", headers=HEADERS)  # it may have been told to pause
    return failures


def test_nothing_that_the_description_allows_is_a_5xx(rig: ServerRig):
    assert fuzz(rig, NUM_EXAMPLES) == []
    assert rig.get("/health").status_code == 200
    rig.wait_until_idle()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nothing_that_the_description_allows_is_a_5xx_at_length(rig: ServerRig):
    assert fuzz(rig, 1000) == []
    assert rig.get("/health").status_code == 200
    rig.wait_until_idle()
