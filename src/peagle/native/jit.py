"""Compile kernels with llvmlite, and run them on torch's own OpenMP threads.

A kernel is a function `void(i64 *arguments)`, written with `Builder`. All threads call it, and each takes its share of
the work (`Builder.share`). `run` executes a list of kernels in one parallel region, with a barrier between them.

Vectors may be wider than the machine's registers: LLVM splits them.
"""

import contextlib
import ctypes
import hashlib
import logging
import platform
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from peagle.cache import cache_directory, write_atomically

try:
    import llvmlite.binding as llvm
    from llvmlite import ir
except ImportError:  # an optional dependency
    llvm = ir = None


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


log = logging.getLogger(__name__)

_engines: list[Any] = []
"""Own the compiled code, which lives as long as the process."""


def compile_kernel(name: str, write: "Callable[[Builder], None]", lanes: int) -> int:
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


class Builder:
    """Writes the body of a kernel. Numbers are i64 unless noted; vectors have `lanes` elements."""

    def __init__(self, lanes: int) -> None:
        self.module = ir.Module()
        self.module.triple = llvm.get_process_triple()
        self.i8, self.i16, self.i32, self.i64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
        self.half, self.float, self.pointer = ir.HalfType(), ir.FloatType(), ir.PointerType()
        self.lanes = lanes
        self.floats, self.ints = self.vector(self.float), self.vector(self.i32)
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [self.pointer]), "kernel")
        self.ir = ir.IRBuilder(function.append_basic_block())
        self._arguments = function.args[0]
        self._externals: dict[str, Any] = {}

    # Constants and arguments -----------------------------------------------------------------------------------------

    def vector(self, element: Any) -> Any:
        return ir.VectorType(element, self.lanes)

    def integer(self, number: int) -> Any:
        return ir.Constant(self.i64, number)

    def splat(self, number: float) -> Any:
        """A vector of floats, or of 32-bit integers for an int."""
        kind = self.ints if isinstance(number, int) else self.floats
        return ir.Constant(kind, [number] * self.lanes)

    def constant(self, number: float) -> Any:
        return ir.Constant(self.float, number)

    def number(self, index: int) -> Any:
        """Argument `index`, an integer."""
        return self.load(self._arguments, self.integer(index), self.i64)

    def address(self, index: int) -> Any:
        """Argument `index`, the address of a tensor."""
        return self.load(self._arguments, self.integer(index), self.pointer)

    def floating(self, index: int) -> Any:
        """Argument `index`, a float stored as its 64 bits."""
        return self.ir.fptrunc(self.load(self._arguments, self.integer(index), ir.DoubleType()), self.float)

    def external(self, name: str, result: Any, *arguments: Any) -> Any:
        if name not in self._externals:
            self._externals[name] = ir.Function(self.module, ir.FunctionType(result, arguments), name)
        return self._externals[name]

    # Control ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def loop(self, start: Any, stop: Any, step: int = 1) -> Iterator[Any]:
        """for index in range(start, stop, step)"""
        b = self.ir
        head, body, end = (b.append_basic_block() for _ in range(3))
        before = b.block
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(self.i64)
        index.add_incoming(start, before)
        b.cbranch(b.icmp_signed("<", index, stop), body, end)
        b.position_at_end(body)
        yield index
        index.add_incoming(b.add(index, self.integer(step)), b.block)
        b.branch(head)
        b.position_at_end(end)

    def share(self, total: Any) -> tuple[Any, Any]:
        """This thread's part of range(total): first and end."""
        b = self.ir
        thread = b.sext(b.call(self.external("omp_get_thread_num", self.i32), []), self.i64)
        threads = b.sext(b.call(self.external("omp_get_num_threads", self.i32), []), self.i64)
        return b.udiv(b.mul(total, thread), threads), b.udiv(b.mul(total, b.add(thread, self.integer(1))), threads)

    def thread(self) -> Any:
        return self.ir.sext(self.ir.call(self.external("omp_get_thread_num", self.i32), []), self.i64)

    def variable(self, kind: Any, value: Any) -> Any:
        """A local variable. Becomes a register."""
        with self.ir.goto_entry_block():
            place = self.ir.alloca(kind)
        self.ir.store(value, place)
        return place

    def get(self, variable: Any) -> Any:
        return self.ir.load(variable, typ=variable.allocated_type)

    def set(self, variable: Any, value: Any) -> None:
        self.ir.store(value, variable)

    # Memory ----------------------------------------------------------------------------------------------------------

    def place(self, base: Any, offset: Any, kind: Any) -> Any:
        """The address of element `offset` of an array of `kind`."""
        return self.ir.gep(base, [offset], source_etype=kind)

    def load(self, base: Any, offset: Any, kind: Any) -> Any:
        return self.ir.load(self.place(base, offset, kind), typ=kind)

    def load_vector(self, base: Any, offset: Any, kind: Any) -> Any:
        """`lanes` elements from element `offset` on."""
        return self.ir.load(self.place(base, offset, kind), typ=self.vector(kind), align=1)

    def store_vector(self, value: Any, base: Any, offset: Any) -> None:
        self.ir.store(value, self.place(base, offset, self.float), align=4)

    # Arithmetic ------------------------------------------------------------------------------------------------------

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, rounded once."""
        kind = a.type
        name = f"llvm.fma.v{self.lanes}f32" if kind == self.floats else "llvm.fma.f32"
        return self.ir.call(self.external(name, kind, kind, kind, kind), [a, b, c])

    def spread(self, scalar: Any) -> Any:
        """A float in every lane."""
        undefined = ir.Constant(self.floats, ir.Undefined)
        one = self.ir.insert_element(undefined, scalar, ir.Constant(self.i32, 0))
        return self.ir.shuffle_vector(one, undefined, ir.Constant(self.ints, [0] * self.lanes))

    def sum(self, value: Any) -> Any:
        """The sum of the lanes, always in the same order."""
        return self._reduced("fadd", value, ir.Constant(self.float, 0.0))

    def _reduced(self, name: str, value: Any, *start: Any) -> Any:
        full_name = f"llvm.vector.reduce.{name}.v{self.lanes}f32"
        function = self.external(full_name, self.float, *(self.float for _ in start), self.floats)
        return self.ir.call(function, [*start, value], fastmath=("reassoc",) if start else ())

    def max(self, value: Any) -> Any:
        """The largest lane."""
        return self._reduced("fmax", value)

    def sums(self, vectors: Sequence[Callable[[], Any]]) -> Any:
        """A vector whose lane k is the sum of the lanes of `vectors[k]()`; cheaper than one sum for each.

        With fewer vectors than lanes, the lanes k, k + len(vectors), ... are left of the k-th.
        """
        if len(vectors) == 1:
            return vectors[0]()
        half = len(vectors) // 2
        return self._half_summed(self.sums(vectors[:half]), self.sums(vectors[half:]), half)

    def sum_as_in_sums(self, value: Any) -> Any:
        """The sum of the lanes, added in the same order as by `sums`."""
        number = 1
        while number < self.lanes:
            value, number = self._half_summed(value, value, number), 2 * number
        return self.ir.extract_element(value, ir.Constant(self.i32, 0))

    def _half_summed(self, one: Any, other: Any, number: int) -> Any:
        """Two vectors in one, with half of the lanes of each: those that belong together are added in pairs.

        Both hold `number` sums in turn. The first additions stay within groups of four lanes: such shuffles cost least.
        """
        group = min(4, self.lanes) if number < 4 else self.lanes
        halves = [
            [
                start + source + part * number + each
                for start in range(0, self.lanes, group)
                for part in range(first, first + group // (2 * number))
                for source in (0, self.lanes)
                for each in range(number)
            ]
            for first in (0, group // (2 * number))
        ]
        return self.ir.fadd(
            *(
                self.ir.shuffle_vector(one, other, ir.Constant(ir.VectorType(self.i32, self.lanes), half))
                for half in halves
            )
        )

    def larger(self, a: Any, b: Any) -> Any:
        return self.ir.select(self.ir.fcmp_ordered(">", a, b), a, b)

    def larger_integer(self, a: Any, b: Any) -> Any:
        return self.ir.select(self.ir.icmp_signed(">", a, b), a, b)

    def smaller_integer(self, a: Any, b: Any) -> Any:
        return self.ir.select(self.ir.icmp_signed("<", a, b), a, b)
