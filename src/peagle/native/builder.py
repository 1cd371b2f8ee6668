"""Write the body of a kernel in LLVM's intermediate representation, with vectors of floats.

Vectors may be wider than the machine's registers: LLVM splits them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

try:
    import llvmlite.binding as llvm
    from llvmlite import ir
except ImportError:  # an optional dependency
    llvm = ir = None


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
    def loop(self, start: Any, stop: Any, step: Any = 1) -> Iterator[Any]:
        """for index in range(start, stop, step)"""
        increment = self.integer(step) if isinstance(step, int) else step
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
        index.add_incoming(b.add(index, increment), b.block)
        b.branch(head)
        b.position_at_end(end)

    def share(self, total: Any) -> tuple[Any, Any]:
        """This thread's part of range(total): first and end."""
        b, thread, threads = self.ir, self.thread(), self.num_threads()
        return b.udiv(b.mul(total, thread), threads), b.udiv(b.mul(total, b.add(thread, self.integer(1))), threads)

    def thread(self) -> Any:
        return self.ir.sext(self.ir.call(self.external("omp_get_thread_num", self.i32), []), self.i64)

    def num_threads(self) -> Any:
        return self.ir.sext(self.ir.call(self.external("omp_get_num_threads", self.i32), []), self.i64)

    def variable(self, kind: Any, value: Any) -> Any:
        """A local variable. Becomes a register."""
        with self.ir.goto_entry_block():
            place = self.ir.alloca(kind)
        self.ir.store(value, place)
        return place

    def scratch(self, num_bytes: Any) -> Any:
        """The address of memory on the stack. Not in a loop: it is kept until the kernel ends."""
        room = self.ir.alloca(self.i8, size=num_bytes)
        room.align = 64
        return self.get(self.variable(self.pointer, room))

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
        """A float or an integer in every lane."""
        undefined = ir.Constant(self.vector(scalar.type), ir.Undefined)
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
