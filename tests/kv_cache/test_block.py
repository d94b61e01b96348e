"""What a block is named by, and how prefixes are compared."""

from __future__ import annotations

import pytest

from cb_engine.kv_cache.block import common_prefix_length


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 511, 512, 700])
@pytest.mark.parametrize("kind", [list, tuple])
def test_the_common_prefix_is_measured_to_the_token(length: int, kind: type):
    tokens = list(range(length))
    assert common_prefix_length(tokens, kind(tokens)) == length
    assert common_prefix_length(tokens, kind([*tokens, 7])) == length
    assert common_prefix_length([*tokens, -1], kind([*tokens, -2, 5])) == length
