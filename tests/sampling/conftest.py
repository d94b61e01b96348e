"""Everything about sampling runs twice: with the native kernel for free draws, and without."""

from __future__ import annotations

import pytest

from cb_engine.native import build
from tests.sampling import common


@pytest.fixture(params=["torch", "native"], autouse=True)
def sampler_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "native" and not build.load():
        pytest.skip("the native kernels cannot be built here")
    monkeypatch.setattr(common, "_native", request.param == "native")
