"""Compiles the native kernels at first use, into a cache of the user.

There is one library for each instruction set (AVX-512, AVX2, portable) and each version of the sources, to which the
header `abi.h` belongs that `abi.py` writes. Its file name holds both, so libraries are never overwritten and different
hosts can share a home directory. Processes that build at the same time each write a separate file and rename it;
their contents are the same. Beside a library lies its SHA-256: one that was cut off, by a full disk or a copy, is built
again.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import POINTER, c_void_p
from pathlib import Path

import torch

from cope_sweep.kernels.native import abi

SOURCES = Path(__file__).parent
FLAGS = ["-std=gnu++17", "-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC", "-w"]
TARGETS = {"avx512": ["-march=x86-64-v4"], "avx2": ["-march=x86-64-v3"], "portable": []}


class BuildError(Exception):
    """The library could not be built or loaded; the message says why."""


def best_target() -> str:
    """The best instruction set of this processor: avx512, avx2 or portable."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return "portable"
    capability = torch.backends.cpu.get_cpu_capability()
    return {"AVX512": "avx512", "AVX2": "avx2"}.get(capability, "portable")


@functools.cache
def library(target: str) -> ctypes.CDLL:
    """The compiled kernels for an instruction set, from the cache or newly built. Raises BuildError."""
    try:
        native = ctypes.CDLL(str(build(target)))
    except OSError as error:
        raise BuildError(f"the native kernels could not be loaded: {error}") from error
    problem, view, gradients = POINTER(abi.Problem), POINTER(abi.View), POINTER(abi.Gradients)
    native.cope_forward.argtypes = [problem, view, view, c_void_p]
    native.cope_backward.argtypes = [problem, view, view, c_void_p, view, gradients]
    native.cope_forward.restype = native.cope_backward.restype = None
    return native


def libraries_dir() -> Path:
    """The folder of the libraries: $XDG_CACHE_HOME/cope-sweep, or ~/.cache/cope-sweep."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cope-sweep"


def build(target: str) -> Path:
    """Compile the library for an instruction set, unless the cache has it, and return its path. Raises BuildError."""
    compiler = _compiler()
    command = [compiler or "g++", *FLAGS, *TARGETS[target], str(SOURCES / "attention.cpp")]
    path = libraries_dir() / f"attention-{target}-{platform.machine()}-{_digest(command)}.so"
    if _is_intact(path):
        return path
    if compiler is None:
        raise BuildError("no C++ compiler was found: install g++, or set CXX to a compiler")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as folder:
            fresh = Path(folder) / "attention.so"
            (Path(folder) / "abi.h").write_text(abi.header())
            compilation = subprocess.run(
                [*command, "-I", folder, "-o", str(fresh)],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            if compilation.returncode:
                raise BuildError(f"{compiler} could not compile the native kernels: {_first_error(compilation.stderr)}")
            checksum = Path(folder) / "checksum"
            checksum.write_text(_sha256(fresh))
            # A process that is killed between the two leaves a library that the next one builds again.
            checksum.replace(_checksum_file(path))
            # In one step, so that no other process loads a half-written library.
            fresh.replace(path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the native kernels could not be built in {path.parent}: {error}") from error
    return path


def _checksum_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_intact(path: Path) -> bool:
    # Loading a library that was cut off kills the process: its pages beyond the end of the file raise SIGBUS.
    try:
        return _sha256(path) == _checksum_file(path).read_text()
    except (OSError, UnicodeDecodeError):
        return False


def _compiler() -> str | None:
    """The path of the compiler. Without one, libraries that g++ has built are used (an image that holds them)."""
    names = (os.environ.get("CXX"), "g++", "c++")
    paths = (shutil.which(name) for name in names if name)
    return next(filter(None, paths), None)


def _digest(command: list[str]) -> str:
    # Not the paths of compiler and sources: installations that share a cache share the library.
    digest = hashlib.sha256(repr([Path(command[0]).name, *command[1:-1], abi.header()]).encode())
    for source in sorted(SOURCES.glob("*.h")) + sorted(SOURCES.glob("*.cpp")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _first_error(stderr: str) -> str:
    lines = stderr.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[-1] if lines else "no message")
