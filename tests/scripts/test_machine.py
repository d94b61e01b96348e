"""Peak memory and the machine's description."""

from __future__ import annotations

import json

import pytest
import torch

from bench.machine import PeakMemory, describe_machine


@pytest.mark.skipif(torch.cuda.is_available(), reason="watches the resident set, which is the CPU's figure")
def test_peak_counts_what_came_and_went() -> None:
    with PeakMemory() as peak:
        block = torch.ones(64_000_000, dtype=torch.uint8)
        del block
        assert peak.gigabytes == 0.0  # known only at the end
    assert peak.gigabytes < 1.0
    with PeakMemory() as peak:
        kept = torch.ones(256_000_000, dtype=torch.uint8)
    assert 0.25 <= peak.gigabytes < 0.5
    assert kept.numel() == 256_000_000


def test_description_is_plain_json_without_names_of_hosts() -> None:
    machine = describe_machine()
    assert {"cpu", "cores", "threads", "memory_gb", "gpu", "torch", "transformers", "date"} <= machine.keys()
    assert not {"host", "hostname", "user"} & machine.keys()
    json.dumps(machine)
