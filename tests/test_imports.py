"""Which way imports point (design, section 3), and what must not import torch."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import cb_engine

ROOT = Path(cb_engine.__file__).parent

# Top to bottom: a part may import from its own line and from those below.
LAYERS = (
    {"__init__", "__main__", "cli"},
    {"serve", "rl"},
    {"api"},
    {"engine", "intake", "output_processor", "speculator"},
    {"scheduler", "runner", "metrics"},
    {"kv_cache", "sampling", "speculative", "attention"},
    {
        "request",
        "version",
        "sampling_params",
        "structured_output",
        "grammar",
        "config",
        "speculative_config",
        "hints",
        "device",
        "outputs",
        "errors",
        "detokenizer",
        "models",
        "cache_dir",
        "native",
    },
)
TORCH_FREE = (
    "cb_engine.scheduler.scheduler",
    "cb_engine.scheduler.drafts",
    "cb_engine.scheduler.queue",
    "cb_engine.scheduler.output",
    "cb_engine.kv_cache.block_manager",
    "cb_engine.kv_cache.block_pool",
    "cb_engine.runner.buckets",
    "cb_engine.speculative_config",
    "cb_engine.speculative.proposer",
    "cb_engine.speculative.control",
    "cb_engine.speculative.lookup",
    "cb_engine.config",
    "cb_engine.hints",
    "cb_engine.request",
    "cb_engine.sampling_params",
    "cb_engine.structured_output",
    "cb_engine.grammar.compiler",
    "cb_engine.grammar.masks",
    "cb_engine.grammar.state",
    "cb_engine.outputs",
    "cb_engine.errors",
    "cb_engine.serve.parsers",
)
HEAVY = {"torch", "transformers", "accelerate", "safetensors", "triton"}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@cache
def imports(module: str) -> frozenset[str]:
    """What a module imports anywhere in its text, inside functions and under TYPE_CHECKING too."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            # `from package import name` imports a module if there is one of that name, else something in the package.
            found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base for a in node.names}
    return frozenset(found)


def layer(module: str) -> int:
    """Which line of LAYERS a module stands on."""
    part = module.split(".")[1] if "." in module else "__init__"
    for index, parts in enumerate(LAYERS):
        if part in parts:
            return index
    raise LookupError(f"{module}: {part!r} stands in no layer; give it a place in LAYERS and in the design")


def closure(module: str) -> dict[str, list[str]]:
    """Every module that importing `module` loads, with the chain of imports that leads there.

    The package's own `__init__` is left out: it is the public face and imports everything.
    """
    chains: dict[str, list[str]] = {}
    todo = [(module, [module])]
    while todo:
        name, chain = todo.pop()
        if name in chains or name == "cb_engine":
            continue
        chains[name] = chain
        if name not in MODULES:
            continue
        loaded = set(imports(name))
        for imported in imports(name):  # a.b.c loads a.b as well
            parents = imported.split(".")
            loaded |= {".".join(parents[:i]) for i in range(2, len(parents))}
        todo += [(imported, [*chain, imported]) for imported in loaded]
    return chains


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str):
    ours = {name for name in imports(module) if name.split(".")[0] == "cb_engine"}
    upward = {name for name in ours if layer(name) < layer(module)}
    assert not upward, f"{module} imports from a higher layer: {sorted(upward)}"


@pytest.mark.parametrize("module", TORCH_FREE)
def test_bookkeeping_imports_no_torch(module: str):
    assert module in MODULES
    heavy = {name: chain for name, chain in closure(module).items() if name.split(".")[0] in HEAVY}
    assert not heavy, "; ".join(" -> ".join(chain) for chain in heavy.values())


def test_the_closure_sees_through_packages_and_indirect_imports():
    """The test above would find torch if it were there."""
    assert "torch" in closure("cb_engine.engine")
    assert "torch" in closure("cb_engine.intake")  # through cb_engine.sampling
    assert "cb_engine.request" in closure("cb_engine.scheduler.scheduler")


def test_nothing_imports_the_packages_public_face():
    """`import cb_engine` inside the package would be a circle, and would hide a layer."""
    importers = [
        m for m in MODULES if m != "cb_engine" and "cb_engine" in imports(m) and m.split(".")[1] not in LAYERS[0]
    ]
    assert importers == []


# ---- the public face itself: its names are imported when they are asked for ------------------------------------------


def in_a_new_process(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_the_package_loads_nothing_heavy():
    code = f"import sys, cb_engine; dir(cb_engine); print(sorted({HEAVY!r} & sys.modules.keys()))"
    assert in_a_new_process(code) == "[]"


def test_settings_can_be_made_without_torch():
    code = "import sys; from cb_engine import EngineConfig, SamplingParams; EngineConfig(), SamplingParams()"
    assert in_a_new_process(f"{code}; print('torch' in sys.modules)") == "False"


def test_every_public_name_is_where_the_type_checker_thinks():
    tree = ast.parse(Path(cb_engine.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    found = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    typed = {alias.name: str(node.module) for node in found for alias in node.names}
    assert typed == cb_engine._HOME
    assert sorted(typed) == cb_engine.__all__
    assert set(cb_engine.__all__) <= set(dir(cb_engine))
    for name, module in typed.items():
        assert getattr(cb_engine, name) is getattr(sys.modules[module], name)


def test_modules_are_reached_through_the_package():
    assert in_a_new_process("import cb_engine; print(cb_engine.hints.__name__)") == "cb_engine.hints"


def test_a_name_that_is_none_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'cb_engine' has no attribute 'nonsense'"):
        cb_engine.nonsense  # noqa: B018
    assert not hasattr(cb_engine, "_private")


def test_public_objects_are_pickled_by_their_modules():
    params = cb_engine.SamplingParams(temperature=0.5)
    data = pickle.dumps(params)
    assert b"cb_engine.sampling_params" in data
    assert pickle.loads(data) == params
