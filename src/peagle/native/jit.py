"""Compile kernels with llvmlite, and run them on torch's own OpenMP threads.

A kernel is a function `void(i64 *arguments)`, written with `Builder`. All threads call it, and each takes its share of
the work (`Builder.share`). `run` executes a list of kernels in one parallel region, with a barrier between them.
"""

import contextlib
import ctypes
import hashlib
import logging
import platform
import struct
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from peagle.cache import cache_directory, write_atomically
from peagle.native.builder import Builder

try:
    import llvmlite.binding as llvm
except ImportError:  # an optional dependency
    llvm = None

log = logging.getLogger(__name__)


@cache
def missing() -> str | None:
    """Why this machine cannot run our kernels; None if it can."""
    if llvm is None:
        return "llvmlite is not installed"
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return f"no kernels for {platform.machine()} on {sys.platform}"
    features = llvm.get_host_cpu_features()
    if platform.machine() == "x86_64" and not all(features.get(name) for name in ("avx2", "fma", "f16c")):
        return "the CPU lacks AVX2, FMA or F16C"
    try:
        _openmp()
    except OSError as error:
        return f"torch's OpenMP library is not loaded: {error}"
    return None


@cache
def has_wide_registers() -> bool:
    """Whether a register holds 16 floats, and there are 32 of them."""
    return missing() is None and bool(llvm.get_host_cpu_features().get("avx512f"))


class Call(NamedTuple):
    """A kernel and its arguments: numbers and addresses, as an array of int64."""

    kernel: int
    arguments: Any


def call(kernel: int, *arguments: int | float | Tensor) -> Call:
    """A call with these arguments. Tensors are passed by address; somebody must keep them alive."""
    return Call(kernel, (ctypes.c_int64 * len(arguments))(*map(as_argument, arguments)))


def as_argument(value: int | float | Tensor) -> int:
    """The int64 that a kernel reads with `number`, `floating` or `address`."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, float):
        return int.from_bytes(struct.pack("=d", value), sys.byteorder, signed=True)
    return value


class Calls:
    """A list of calls that `run` executes. The values of their arguments may change between runs."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = list(calls)
        entries = [number for each in calls for number in (each.kernel, ctypes.addressof(each.arguments))]
        self._list = (ctypes.c_int64 * (3 + len(entries)))(len(calls), 0, 0, *entries)
        self._address = ctypes.addressof(self._list)

    def run(self) -> None:
        """Execute the calls one after another, each on all threads."""
        _openmp().GOMP_parallel(_driver(), self._address, torch.get_num_threads(), 0)


@cache
def _openmp() -> ctypes.CDLL:
    """The OpenMP library that torch has loaded, so that its threads are ours too."""
    library = ctypes.CDLL("libgomp.so.1", mode=getattr(ctypes, "RTLD_NOLOAD", 4))
    library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    library.GOMP_parallel.restype = None
    return library


@cache
def _machine() -> Any:
    """LLVM's description of this CPU."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmparser()
    llvm.initialize_native_asmprinter()
    for name in ("omp_get_thread_num", "omp_get_num_threads"):
        llvm.add_symbol(name, ctypes.cast(getattr(_openmp(), name), ctypes.c_void_p).value)
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=_features(), opt=3, jit=True)


def _features() -> str:
    features: str = llvm.get_host_cpu_features().flatten()
    return features + (",-prefer-256-bit" if has_wide_registers() else "")


_engines: list[Any] = []
"""Own the compiled code, which lives as long as the process."""


def compile_kernel(name: str, write: Callable[[Builder], None], lanes: int) -> int:
    """The address of the kernel `name`, whose body `write` builds with vectors of `lanes` floats."""

    def assembly() -> str:
        builder = Builder(lanes)
        write(builder)
        builder.ir.ret_void()
        return str(builder.module)

    return _compile(name, assembly)


def _compile(name: str, assembly: Callable[[], str]) -> int:
    """Compile, or take the object code of an earlier process from the cache directory."""
    file, machine = cache_directory() / "kernels" / f"{name}-{_compiler_key()}.o", _machine()
    code = _read_code(file)
    if code is None:
        _say_once()
        code = _object_code(assembly(), machine)
        with contextlib.suppress(OSError):  # a cache that cannot be written costs time only
            write_atomically(file, hashlib.sha256(code).digest() + code)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    address: int = engine.get_function_address("kernel")
    return address


@cache
def _say_once() -> None:
    log.info("compiling kernels for this CPU, which takes a few seconds; they are kept in %s", cache_directory())


def _read_code(file: Path) -> bytes | None:
    """The object code behind its hash; None if there is none, or if it was cut short. Running it would be fatal."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    size = hashlib.sha256().digest_size
    digest, code = content[:size], content[size:]
    return code if hashlib.sha256(code).digest() == digest else None


def _object_code(assembly: str, machine: Any) -> bytes:
    module = llvm.parse_assembly(assembly)
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = False  # the kernels use vectors themselves
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    code: bytes = machine.emit_object(module)
    return code


@cache
def _compiler_key() -> str:
    """A hash of what the object code of a kernel depends on: this package, LLVM and the CPU."""
    digest = hashlib.sha256(f"{llvm.llvm_version_info} {llvm.get_host_cpu_name()} {_features()}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


_PAUSE = {"x86_64": "pause", "aarch64": "yield"}
_SPINS = 1000
"""pauses of a thread that waits for the others; then it yields its core to whoever wants it"""


@cache
def _driver() -> int:
    """Runs a list, [number of calls, two numbers of the barrier, kernel, arguments, kernel, arguments, ...].

    Between two calls all threads wait for each other. They wait for microseconds, too short to sleep: OpenMP's own
    barrier sleeps at once with OMP_WAIT_POLICY=passive, and waking up takes longer than most kernels.
    """
    return _compile(
        "driver",
        lambda: (
            f"""
        declare i32 @omp_get_num_threads()
        declare i32 @sched_yield()
        define void @kernel(ptr %list) {{
        entry:
          %length = load i64, ptr %list
          %num_arrived = getelementptr i64, ptr %list, i64 1
          %num_passed = getelementptr i64, ptr %list, i64 2
          %threads = call i32 @omp_get_num_threads()
          %num_threads = sext i32 %threads to i64
          br label %call
        call:
          %index = phi i64 [0, %entry], [%next, %open], [%next, %wait]
          %offset = shl i64 %index, 1
          %kernel_place = add i64 %offset, 3
          %kernel_entry = getelementptr i64, ptr %list, i64 %kernel_place
          %kernel = load ptr, ptr %kernel_entry
          %arguments_place = add i64 %offset, 4
          %arguments_entry = getelementptr i64, ptr %list, i64 %arguments_place
          %arguments = load ptr, ptr %arguments_entry
          call void %kernel(ptr %arguments)
          %next = add i64 %index, 1
          %is_done = icmp eq i64 %next, %length
          br i1 %is_done, label %end, label %arrive
        arrive:
          %passed = load atomic i64, ptr %num_passed acquire, align 8
          %arrived = atomicrmw add ptr %num_arrived, i64 1 acq_rel
          %others = add i64 %arrived, 1
          %is_last = icmp eq i64 %others, %num_threads
          br i1 %is_last, label %open, label %wait
        open:
          store atomic i64 0, ptr %num_arrived monotonic, align 8
          %now_passed = add i64 %passed, 1
          store atomic i64 %now_passed, ptr %num_passed release, align 8
          br label %call
        wait:
          %turn = phi i64 [0, %arrive], [%next_turn, %spin], [%next_turn, %yield]
          %next_turn = add i64 %turn, 1
          %seen = load atomic i64, ptr %num_passed acquire, align 8
          %is_open = icmp ne i64 %seen, %passed
          br i1 %is_open, label %call, label %again
        again:
          %is_short = icmp ult i64 %turn, {_SPINS}
          br i1 %is_short, label %spin, label %yield
        spin:
          call void asm sideeffect "{_PAUSE[platform.machine()]}", ""()
          br label %wait
        yield:
          call i32 @sched_yield()
          br label %wait
        end:
          ret void
        }}
        """
        ),
    )
