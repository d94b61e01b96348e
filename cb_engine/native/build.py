"""Compiles the C++ kernels on first use, caches the library, loads it into torch.

Owns: the compiler's command lines and the cache folder. Does not know: what the kernels compute.

    python -m cb_engine.native.build      builds ahead of time and prints where the library is

One invocation of the compiler per file, half a minute on two cores; neither ninja nor setuptools is needed, and nothing
depends on the version of Python. The library holds the code for every instruction set and picks at run time, so a
cache folder may be shared between machines.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from filelock import FileLock
from torch.utils.cpp_extension import include_paths, library_paths

from cb_engine.cache_dir import cache_dir

SOURCE_DIR = Path(__file__).parent
LIBRARY_NAME = "cb_engine_native.so"

_OPERATOR_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-w")
# No contraction of a * b + c: where rounding matters the kernels say fma(), and every instance has to round alike.
_KERNEL_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-w", "-ffp-contract=off")
_OPERATORS = ("dispatch.cpp", "dense.cpp", "paged_attention.cpp", "layer.cpp", "sampling.cpp")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_X86_KERNELS: dict[str, tuple[str, ...]] = {
    "isa_avx2.cpp": _AVX2,
    "isa_avx512.cpp": _AVX512,
    "isa_avx512_bf16.cpp": (*_AVX512, "-mavx512bf16"),
}

_lock = threading.Lock()
_loaded: bool | None = None  # None: not tried yet


class BuildError(RuntimeError):
    """The library could not be built; the message says why and what helps."""


def load() -> bool:
    """Makes the operators `torch.ops.cb_engine.*` of this folder available, building them if need be.

    Returns False, after one warning per process, where that is impossible. Safe to call often and from any thread.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            try:
                torch.ops.load_library(str(build()))  # type: ignore[no-untyped-call]
                torch.library.register_fake("cb_engine::paged_attention", _paged_attention_fake)
                _loaded = True
            except (BuildError, OSError) as error:
                warnings.warn(
                    f"cb_engine runs without its native CPU kernels, several times slower: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
                _loaded = False
        return _loaded


def build() -> Path:
    """Path of the library for this source and torch, compiled now unless it is in the cache."""
    if sys.platform == "win32":
        raise BuildError("the kernel is built on Linux and macOS only")
    root = library_dir()
    source_key = _digest(_source_bytes(), torch.__version__, platform.machine(), repr(_link_flags("")))
    compiler = find_compiler()
    if compiler is None:
        ready = sorted(root.glob(f"{source_key}-*/{LIBRARY_NAME}"))
        if ready:  # built by an earlier compiler, e.g. while the image was made
            return ready[0]
        raise BuildError("no C++ compiler found; install g++ (or clang++), or name one in the CXX variable")
    library = root / f"{source_key}-{_digest(*compiler, _version(compiler))}" / LIBRARY_NAME
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(library.parent / "lock"):
        if not library.exists():  # another process may have built it while this one waited
            _compile(compiler, library)
    return library


def library_dir() -> Path:
    """Where built libraries are kept."""
    return cache_dir() / "native"


def find_compiler() -> tuple[str, ...] | None:
    """The C++ compiler's command, `$CXX` first, or None."""
    candidates = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    for command in (tuple(shlex.split(candidate)) for candidate in candidates):
        if command and shutil.which(command[0]):
            return command
    return None


def _version(compiler: Sequence[str]) -> str:
    return _run((*compiler, "--version"))


def _source_bytes() -> bytes:
    files = sorted(path for path in SOURCE_DIR.iterdir() if path.suffix in (".cpp", ".h"))
    return b"".join(path.name.encode() + b"\0" + path.read_bytes() for path in (*files, Path(__file__)))


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:16]


def _compile(compiler: tuple[str, ...], library: Path) -> None:
    """Compiles all files side by side, links what there is, and moves the result into place in one step."""
    openmp = () if sys.platform == "darwin" else ("-fopenmp",)
    includes = tuple(f"-isystem{path}" for path in include_paths())
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    flags = {
        **dict.fromkeys(_OPERATORS, (*_OPERATOR_FLAGS, *openmp, abi, *includes)),
        "isa_portable.cpp": _KERNEL_FLAGS,
    }
    if platform.machine() in ("x86_64", "AMD64"):
        flags |= {name: (*_KERNEL_FLAGS, *extra) for name, extra in _X86_KERNELS.items()}

    with tempfile.TemporaryDirectory(dir=library.parent) as folder:

        def compile_one(name: str) -> str | None:
            target = str(Path(folder, name).with_suffix(".o"))
            try:
                _run((*compiler, *flags[name], "-c", str(SOURCE_DIR / name), "-o", target))
            except BuildError:
                if name in _X86_KERNELS:  # an old compiler; the operator finds this entry empty
                    return None
                raise
            return target

        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            objects = [target for target in pool.map(compile_one, flags) if target is not None]
        built = str(Path(folder, LIBRARY_NAME))
        _run((*compiler, "-shared", *objects, "-o", built, *_link_flags(_version(compiler))))
        os.replace(built, library)


def _link_flags(compiler_version: str) -> tuple[str, ...]:
    """How to link against torch.

    GCC's OpenMP runtime is deliberately not linked: torch brings its own copy, and the library finds that one
    through libtorch. A second copy would be a second pool of threads on the same cores.
    """
    paths = tuple(f"-L{path}" for path in library_paths())
    libraries = ("-ltorch_cpu", "-lc10")
    if sys.platform == "darwin":
        return (*paths, *libraries, "-undefined", "dynamic_lookup")
    openmp = ("-fopenmp",) if "clang" in compiler_version else ()
    return (*paths, *libraries, *openmp)


def _run(command: Sequence[str]) -> str:
    """Output of a command; `BuildError` with the gist of what it printed if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        gist = "\n  ".join(lines[:5])
        raise BuildError(f"{command[0]} failed (a C++20 compiler, g++ 10 or newer, is needed):\n  {gist}")
    return done.stdout


def _paged_attention_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """What torch.compile has to know: the result is a new contiguous tensor like the query."""
    return query.new_empty(query.shape)


def main() -> int:
    """Builds and says where; the exit status is 1 where that fails."""
    begin = time.perf_counter()
    try:
        library = build()
    except BuildError as error:
        print(f"not built: {error}", file=sys.stderr)
        return 1
    print(f"{library}  ({time.perf_counter() - begin:.1f} s)")
    if not load():
        return 1
    names = ("portable", "avx2", "avx512", "avx512_bf16")
    print("instruction sets here:", ", ".join(names[isa] for isa in torch.ops.cb_engine.supported_isas()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
