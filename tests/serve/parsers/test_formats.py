"""The formats are told from what decides in public chat templates: here, their decisive fragments."""

from __future__ import annotations

import pytest

from cb_engine.serve.parsers import ReasoningFormat, ToolFormat, detect_reasoning_format, detect_tool_format

HERMES = """{{- "<tool_call>\\n" }}{{- '{"name": "' ~ call.name ~ '", "arguments": ' }}{{- "}\\n</tool_call>" }}"""
QWEN3_CODER = "{{- '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}{{- '<parameter=' + key + '>\\n' }}"
LLAMA_JSON = """{{- "Environment: ipython\\n" }}{{- '{"name": "' + call.name + '", ' }}{{- '"parameters": ' }}"""
LLAMA_31 = """{{- '<|python_tag|>' + call.name + '.call(' }}{{- '"parameters": ' }}"""
LLAMA_PYTHONIC = """{{- "Environment: ipython\\n" }}{{- "Use the format [f(x=1), g(y=2)]" }}{{- call.name + '(' }}"""
MISTRAL = """{{- "[AVAILABLE_TOOLS] [" }}{{- "[TOOL_CALLS] [" }}{{- call.function|tojson }}"""
MISTRAL_ARGS = "{{- '[TOOL_CALLS]' + call.name + '[ARGS]' + arguments }}"
GLM = "{{ '\\n<tool_call>' + call.name }}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value></tool_call>"
CHATML = "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n'}}"


@pytest.mark.parametrize(
    ("template", "form"),
    [
        pytest.param(HERMES, ToolFormat.HERMES, id="hermes-qwen"),
        pytest.param(QWEN3_CODER, ToolFormat.QWEN_XML, id="qwen3-coder"),
        pytest.param(LLAMA_JSON, ToolFormat.LLAMA3_JSON, id="llama-json"),
        pytest.param(LLAMA_31, ToolFormat.LLAMA3_JSON, id="llama-3.1"),
        pytest.param(LLAMA_PYTHONIC, ToolFormat.JSON, id="llama-pythonic"),
        pytest.param(MISTRAL, ToolFormat.MISTRAL, id="mistral"),
        pytest.param(MISTRAL_ARGS, ToolFormat.MISTRAL_ARGS, id="ministral-3"),
        pytest.param(GLM, ToolFormat.JSON, id="glm"),
        pytest.param(CHATML, ToolFormat.JSON, id="no-tools"),
        pytest.param("", ToolFormat.JSON, id="empty"),
        pytest.param(None, ToolFormat.JSON, id="none"),
    ],
)
def test_the_tool_format_shows_in_the_template(template, form):
    assert detect_tool_format(template) is form


@pytest.mark.parametrize(
    ("template", "form"),
    [
        pytest.param("{{- '<think>\\n\\n</think>\\n\\n' }}", ReasoningFormat.THINK, id="qwen3"),
        pytest.param("{%- set content = content.split('</think>')[-1] %}", ReasoningFormat.THINK, id="r1"),
        pytest.param("{{'<|Assistant|><think>\\n'}}", ReasoningFormat.THINK, id="opened-by-the-prompt"),
        pytest.param("{{- '[THINK]' + block['thinking'] + '[/THINK]' }}", ReasoningFormat.MISTRAL, id="magistral"),
        pytest.param(HERMES, None, id="no-reasoning"),
        pytest.param(None, None, id="none"),
    ],
)
def test_the_reasoning_format_shows_in_the_template(template, form):
    assert detect_reasoning_format(template) is form


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|Assistant|><think>", True),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("What does <think> mean?<|im_end|>\n<|im_start|>assistant\n", False),
    ],
)
def test_the_end_of_the_prompt_says_whether_reasoning_is_open(prompt, is_open):
    assert ReasoningFormat.THINK.is_open_in(prompt) is is_open


def test_formats_are_what_an_operator_writes():
    assert ToolFormat("hermes") is ToolFormat.HERMES
    assert [form.value for form in ToolFormat] == [
        "hermes",
        "qwen_xml",
        "llama3_json",
        "mistral",
        "mistral_args",
        "json",
    ]
    assert (ReasoningFormat.MISTRAL.start, ReasoningFormat.MISTRAL.end) == ("[THINK]", "[/THINK]")
