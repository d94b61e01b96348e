"""Where this engine's time goes: per kind of step, per kind of work, against what the machine can do.

A case runs twice, step by step, with the same requests and so with the same steps: once undisturbed for the time of a
step, once under torch's profiler, in some of its steps, for the time of operators. What a forward takes beyond products
and attention is called element-wise; it includes the dispatch of all operators and the making of its inputs. Scheduling
is all that a step does before and after its plan is executed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import cb_engine
from bench.peers import Case
from cb_engine.models import load_model

_GEMM = ("cb_engine::linear", "mkldnn::_linear_pointwise", "aten::addmm", "aten::mm", "aten::linear", "aten::bmm")
_ATTENTION = ("cb_engine::paged_attention",)
_PROFILED_DECODES = 40  # spread over the run: traces are large. Prefills are few, and no two alike: all are profiled.
_GIGA = 1e9


@dataclass
class Kind:
    """Sums over the steps of one kind."""

    steps: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    profiled: int = 0
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(frozen=True)
class Ceilings:
    """What the machine reaches when it does nothing else."""

    flops: float  # a second, large products of the model's dtype
    bytes: float  # a second, read from memory


@dataclass(frozen=True)
class _Work:
    """One request's part of a step, as it was before the step."""

    start: int
    num_tokens: int
    samples: bool

    @classmethod
    def of(cls, item: Any) -> _Work:
        return cls(item.start, item.num_tokens, item.samples)


@dataclass(frozen=True)
class _Costs:
    """What a step has to compute and read at least."""

    layer_parameters: int
    head_parameters: int
    itemsize: int
    kv_bytes_per_token: int
    attention_flops_per_pair: int

    def of(self, scheduled: Iterable[_Work]) -> tuple[float, float]:
        """Operations and bytes of one step."""
        rows = logits = pairs = keys = 0
        for item in scheduled:
            rows += item.num_tokens
            logits += item.samples
            keys += item.start + item.num_tokens
            pairs += item.num_tokens * item.start + item.num_tokens * (item.num_tokens + 1) // 2
        flops = 2 * (rows * self.layer_parameters + logits * self.head_parameters)
        weights = (self.layer_parameters + self.head_parameters * (logits > 0)) * self.itemsize
        return flops + pairs * self.attention_flops_per_pair, weights + keys * self.kv_bytes_per_token


def profile_cases(model_name: str, cases: Sequence[Case]) -> str:
    """Runs every case and returns a table."""
    model, _ = load_model(model_name)
    ceilings = measure_ceilings(model.dtype)
    lines = [
        f"ceilings: {ceilings.flops / _GIGA:.0f} GFLOP/s in products, {ceilings.bytes / _GIGA:.0f} GB/s from memory",
        f"{'case':18} {'step':8} {'steps':>5} {'ms/step':>8} {'GEMM':>6} {'attn':>6} {'elem':>6} {'sample':>6} "
        f"{'sched':>6} {'GFLOP/s':>8} {'of max':>6} {'GB/s':>6} {'of max':>6} {'floor ms':>8}",
    ]
    for case in cases:
        for name, kind in sorted(_profile(model, case).items()):
            lines.append(f"{case.label:18} {name:8} {_line(kind, ceilings)}")
    return "\n".join(lines)


def _line(kind: Kind, ceilings: Ceilings) -> str:
    step = kind.seconds / kind.steps
    parts = {name: kind.parts[name] / max(1, kind.profiled) for name in ("gemm", "attn", "sample", "sched")}
    forward = step - parts["sample"] - parts["sched"]
    parts["elem"] = max(0.0, forward - parts["gemm"] - parts["attn"])
    shares = " ".join(f"{parts[name] / step:6.1%}" for name in ("gemm", "attn", "elem", "sample", "sched"))
    flops, read = kind.flops / kind.seconds, kind.bytes / kind.seconds
    floor = max(kind.flops / ceilings.flops, kind.bytes / ceilings.bytes) / kind.steps
    return (
        f"{kind.steps:5} {step * 1e3:8.2f} {shares} {flops / _GIGA:8.0f} {flops / ceilings.flops:6.0%} "
        f"{read / _GIGA:6.1f} {read / ceilings.bytes:6.0%} {floor * 1e3:8.2f}"
    )


def _profile(model: Any, case: Case) -> dict[str, Kind]:
    kinds: dict[str, Kind] = defaultdict(Kind)
    names: list[str] = []
    engine, costs = _engine_with(model, case)
    while engine.has_work:
        with StepSpy(engine) as spy:
            engine.step()
        names.append("decode" if spy.is_decode else "prefill")
        kind, (flops, read) = kinds[names[-1]], costs.of(spy.scheduled)
        kind.steps += 1
        kind.seconds += spy.seconds
        kind.flops += flops
        kind.bytes += read
    engine.close()
    engine, _ = _engine_with(model, case)
    stride = max(1, names.count("decode") // _PROFILED_DECODES)
    for index, name in enumerate(names):
        if name == "prefill" or index % stride == 0:
            with profile(activities=[ProfilerActivity.CPU]) as trace, StepSpy(engine) as spy:
                engine.step()
            _add_parts(kinds[name], trace, spy.scheduling_seconds)
        else:
            engine.step()
    engine.close()
    return kinds


class StepSpy:
    """Sees the plan of a step, and how long the step takes with and without its execution."""

    def __init__(self, engine: cb_engine.Engine) -> None:
        self.scheduled: Sequence[_Work] = ()
        self.is_decode = False
        self.seconds = self.scheduling_seconds = 0.0
        self._runner = engine._runner
        self._executing = 0.0

    def __enter__(self) -> StepSpy:
        self._runner.execute = self._execute  # type: ignore[method-assign]
        self._start = time.perf_counter()
        return self

    def __exit__(self, *details: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self.scheduling_seconds = self.seconds - self._executing
        del self._runner.execute  # the method of its class is seen again

    def _execute(self, plan: Any) -> Any:
        self.scheduled, self.is_decode = [_Work.of(item) for item in plan.scheduled], plan.is_decode
        start = time.perf_counter()
        output = type(self._runner).execute(self._runner, plan)
        self._executing = time.perf_counter() - start
        return output


def _add_parts(kind: Kind, trace: profile, scheduling: float) -> None:
    kind.profiled += 1
    kind.parts["sched"] += scheduling
    for event in trace.key_averages():
        if event.key in _GEMM:
            kind.parts["gemm"] += event.self_cpu_time_total / 1e6
        elif event.key in _ATTENTION:
            kind.parts["attn"] += event.self_cpu_time_total / 1e6
        elif event.key == "cb_engine.sample":
            kind.parts["sample"] += event.cpu_time_total / 1e6


def _engine_with(model: Any, case: Case) -> tuple[cb_engine.Engine, _Costs]:
    hints = {
        "max_prompt_length": max(map(len, case.prompts)),
        "max_generated_length": case.max_new,
        "num_requests": len(case.prompts) * case.n,
    }
    engine = cb_engine.Engine(model, hints=hints)
    params = cb_engine.SamplingParams(
        temperature=case.temperature, n=case.n, max_tokens=case.max_new, ignore_eos=True, seed=0
    )
    for prompt in case.prompts:
        engine.add_request(prompt, params)
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    head = model.get_output_embeddings().weight
    linears = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    return engine, _Costs(
        layer_parameters=sum(weight.numel() for weight in linears) - head.numel(),
        head_parameters=head.numel(),
        itemsize=head.itemsize,
        kv_bytes_per_token=2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * head.itemsize,
        attention_flops_per_pair=4 * config.num_hidden_layers * config.num_attention_heads * head_dim,
    )


def measure_ceilings(dtype: torch.dtype) -> Ceilings:
    """The best of several tries of a large product and of reading a gigabyte."""
    size, words = 2048, 1 << 28
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    large = torch.ones(words)
    with torch.inference_mode():
        product = min(_seconds(lambda: torch.matmul(a, b)) for _ in range(10))
        reading = min(_seconds(large.sum) for _ in range(5))
    return Ceilings(2 * size**3 / product, words * large.itemsize / reading)


def _seconds(action: Any) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
