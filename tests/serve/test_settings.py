"""What an operator may say."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from cb_engine.serve.parsers import ToolFormat
from cb_engine.serve.settings import Limits, ServeSettings, ToolFormatName


def test_every_tool_format_can_be_asked_for():
    assert set(get_args(ToolFormatName)) == {"auto", *ToolFormat}


def test_keys_are_not_shown():
    shown = repr(ServeSettings(model_name="m", api_key="secret-1", admin_key="secret-2"))
    assert "secret" not in shown


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"api_key": ""}, "api_key must be"),
        ({"admin_key": "kéy"}, "admin_key must be"),
        ({"api_key": "k", "admin_key": "k"}, "are the same"),
        ({"max_waiting_time": 0}, "max_waiting_time=0"),
        ({"max_running_time": float("nan")}, "max_running_time=nan"),
        ({"text_timeout": -1}, "text_timeout=-1"),
        ({"send_timeout": 0}, "send_timeout=0"),
        ({"shutdown_timeout": -1}, "shutdown_timeout=-1"),
        ({"engine_restarts": -1}, "engine_restarts=-1"),
    ],
    ids=str,
)
def test_wrong_settings_are_named(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ServeSettings(model_name="m", **fields)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
def test_limits_are_positive_counts(value: Any):
    with pytest.raises(ValueError, match="max_stop="):
        Limits(max_stop=value)
