"""What tests of several folders share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cb_engine.native import build

ISAS: list[int] = list(torch.ops.cb_engine.supported_isas()) if build.load() else []


@pytest.fixture(params=ISAS, ids=lambda isa: ("portable", "avx2", "avx512", "avx512_bf16")[isa])
def isa(request: pytest.FixtureRequest) -> Iterator[int]:
    """Every instruction set of the native kernels that this CPU has, one after the other."""
    before = torch.ops.cb_engine.set_isa(request.param)
    yield request.param
    torch.ops.cb_engine.set_isa(before)
