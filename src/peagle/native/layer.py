"""Decoder layers over pages as one call of our CPU kernels: attention and a gated MLP, each with norm and residual.

`NativeLayer` takes its parts from a module of that form, of a target or of a drafter, with the names of the Llama
family. Whoever uses it compares its output with the module's: a norm or a scale may hide something else. Layers that
follow each other run together, in one parallel region (`run_layers`).

Shapes: N rows, D model width, I width of the attention's input, E head width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from peagle.kernels.attention import PagedRows
from peagle.linears.joined_linear import JoinedPart, gate_activation
from peagle.native.jit import Calls
from peagle.native.layer_kernels import (
    LANES,
    MAX_LANES,
    MAX_ROWS,
    attention_call,
    gate_call,
    heads_together,
    norm_call,
    rotary_call,
)
from peagle.native.packed_linear import PackedLinear
from peagle.native.products import KEPT_ROWS, PackedWeight, Product, compile_products, make_product, new_scratch

LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}


class UnknownPartError(Exception):
    """The layer has other parts than ours, or parts in another form."""


class Workspace:
    """Buffers that the layers of a model share."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._products: dict[tuple[int, bool], Tensor] = {}
        self._scores = torch.empty(0, 0)

    def buffer(self, name: str, num_rows: int, width: int) -> Tensor:
        """The first rows of a buffer, which stays where it is: calls keep its address."""
        if (name, width) not in self._buffers:
            self._buffers[name, width] = torch.empty(MAX_ROWS, width)
        return self._buffers[name, width][:num_rows]

    def product(self, x: Tensor, weight: PackedWeight, y: Tensor, added: Tensor | None = None) -> Product:
        """A product that shares its scratch memory with those of as many inputs."""
        key = weight.num_inputs, weight.is_tiled
        if key not in self._products:
            self._products[key] = new_scratch(weight, MAX_ROWS)
        return make_product(x, weight, y, added, self._products[key])

    def scores(self, num_rows: int, width: int) -> Tensor:
        """Scratch memory of at least this size. It may move from pass to pass."""
        if self._scores.shape[0] < num_rows or self._scores.shape[1] < width:
            self._scores = torch.empty(num_rows, width)
        return self._scores


class NativeLayer:
    """Raises `UnknownPartError` if the kernels cannot compute the layer."""

    def __init__(self, layer: Any, workspace: Workspace, window: int, first_key: int = 0) -> None:
        """`window` and `first_key` as in `paged_attention`."""
        attention, mlp = layer.self_attn, layer.mlp
        self.window, self.first_key, self.workspace = window, first_key, workspace
        if (activation := gate_activation(mlp)) is None:
            raise UnknownPartError("the MLP is not gated")
        self.activation = activation
        self.input_norm, self.mlp_norm = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        names = {name for name, _ in attention.named_children()}
        if names not in (ATTENTION_PARTS, ATTENTION_PARTS | HEAD_NORMS):
            raise UnknownPartError("other projections than query, key, value and output")
        self.head_norms = None
        if names > ATTENTION_PARTS:
            (q_norm, epsilon), (k_norm, _) = _norm(attention.q_norm), _norm(attention.k_norm)
            self.head_norms = q_norm, k_norm, epsilon
        linears = [_packed(each) for each in (attention.q_proj, attention.o_proj, mlp.gate_proj, mlp.down_proj)]
        if any(linear.bias is not None for linear in linears[1:]):
            raise UnknownPartError("a bias after attention or in the MLP")
        self.qkv_bias = linears[0].bias
        self.qkv, self.output, self.gate_up, self.down = (linear.packed for linear in linears)
        weights = (self.qkv, self.output, self.gate_up, self.down)
        self.most_rows = MAX_ROWS if all(weight.is_for_prompts for weight in weights) else KEPT_ROWS
        self.width = int(attention.head_dim)
        self.num_heads = self.output.num_inputs // self.width
        self.num_groups = (self.qkv.num_outputs // self.width - self.num_heads) // 2
        self.scale = float(getattr(attention, "scaling", self.width**-0.5))
        if self.width % (2 * LANES) or self.output.num_outputs % LANES or self.down.num_inputs % LANES:
            raise UnknownPartError(f"widths that are no multiples of {LANES}")
        self._passes: dict[tuple[int, bool], _Pass] = {}
        self._together: dict[tuple[int, int, bool], Calls] = {}
        """the calls of this layer and those that follow, by number of layers and rows"""

    def compile(self) -> None:
        """Compile all kernels now, so that no step waits for them."""
        for weight in (self.output, self.down):
            compile_products(weight, is_added=True)
        for num_rows in (1, MAX_ROWS):  # heads run alone, and together
            self.layer_pass(num_rows, is_given=False)

    def layer_pass(self, num_rows: int, is_given: bool) -> "_Pass":
        """This layer's part of a pass. `is_given`: its attention reads an input of its own."""
        known = self._passes.get((num_rows, is_given)) or _Pass(self, num_rows, is_given)
        if num_rows <= KEPT_ROWS:
            self._passes[num_rows, is_given] = known
        return known

    def calls(self, parts: "Sequence[_Pass]", is_given: bool) -> Calls:
        """The calls of some passes, of which this layer's is the first."""
        key = len(parts), parts[0].num_rows, is_given
        known = self._together.get(key) or Calls([call for part in parts for call in part.calls])
        if parts[0].num_rows <= KEPT_ROWS:
            self._together[key] = known
        return known


def run_layers(
    layers: Sequence[NativeLayer],
    x: Tensor,
    rotary: tuple[Tensor, Tensor],
    pages: Sequence[tuple[Tensor, Tensor]],
    rows: PagedRows,
    attention_input: Tensor | None = None,
) -> Tensor:
    """The output of the last layer for the rows x [1, N, D]. `pages` are those of each layer.

    `attention_input` [1, N, I] replaces the normed rows as the input of the first layer's attention.
    """
    first, is_given = layers[0], attention_input is not None
    x, y = x.contiguous(), torch.empty(x.shape)
    attention_input = attention_input.contiguous() if attention_input is not None else None
    parts = [layer.layer_pass(x.shape[1], is_given and layer is first) for layer in layers]
    states = [first.workspace.buffer(name, *x.shape[1:]) for name in ("state 0", "state 1")]
    inputs = [x, *(states[index % 2] for index in range(len(layers) - 1)), y]
    shared = _Shared(rotary, rows, parts, pages[0][0].shape[1])
    for index, part in enumerate(parts):
        part.fill(inputs[index], inputs[index + 1], shared, pages[index], None if index else attention_input)
    first.calls(parts, is_given).run()
    return y


class _Shared:
    """What all layers of a pass read, and the addresses of it."""

    def __init__(
        self, rotary: tuple[Tensor, Tensor], rows: PagedRows, parts: "Sequence[_Pass]", page_size: int
    ) -> None:
        assert rows.host is not None, "made by on_host"
        table, cells, row_table = rows.host.for_kernels(rows, parts[0].num_rows)
        num_scores = max(part.num_together for part in parts) * torch.get_num_threads()
        scores = parts[0].layer.workspace.scores(num_scores, table.shape[1] * page_size + MAX_LANES)
        self._tensors = [*(each.contiguous() for each in rotary), cells, table, row_table, scores]
        self.cos, self.sin, self.cells, self.table, self.row_table, self.scores = (
            each.data_ptr() for each in self._tensors
        )
        self.sizes = [scores.shape[1], table.shape[1], page_size]


class _Pass:
    """The calls of a layer for one number of rows. `fill` sets what differs from pass to pass."""

    def __init__(self, layer: NativeLayer, num_rows: int, is_given: bool) -> None:
        """`is_given`: the input of the attention is, and there is no norm before it."""
        self.layer, self.num_rows = layer, num_rows
        buffer = layer.workspace.buffer
        normed = buffer("normed", num_rows, layer.output.num_outputs)
        qkv = buffer("qkv", num_rows, layer.qkv.num_outputs)
        attended = buffer("attended", num_rows, layer.output.num_inputs)
        total = buffer("sum", num_rows, layer.output.num_outputs)
        gate_up = buffer("gate_up", num_rows, layer.gate_up.num_outputs)
        gated = buffer("gated", num_rows, layer.down.num_inputs)
        heads = {"num_heads": layer.num_heads, "num_groups": layer.num_groups, "width": layer.width}
        (norm_1, epsilon_1), (norm_2, epsilon_2) = layer.input_norm, layer.mlp_norm
        self._norm = None if is_given else norm_call(normed, norm_1, normed, epsilon_1)
        given = torch.empty(num_rows, layer.qkv.num_inputs) if is_given else normed
        product = layer.workspace.product
        self._qkv = product(given, layer.qkv, qkv, layer.qkv_bias)
        self._rotary = rotary_call(qkv, num_rows, layer.head_norms, **heads)
        self.num_together = heads_together(num_rows, num_threads=torch.get_num_threads(), **heads)
        self._attention = attention_call(
            qkv,
            attended,
            num_rows,
            scale=layer.scale,
            window=layer.window,
            first_key=layer.first_key,
            num_together=self.num_together,
            **heads,
        )
        self._output = product(attended, layer.output, total, normed)
        self._down = product(gated, layer.down, total, total)
        first = [] if self._norm is None else [self._norm]
        self.calls = [
            *first,
            *self._qkv.calls,
            self._rotary,
            self._attention,
            *self._output.calls,
            norm_call(total, norm_2, normed, epsilon_2),
            *product(normed, layer.gate_up, gate_up).calls,
            gate_call(gate_up, gated, layer.activation),
            *self._down.calls,
        ]

    def fill(
        self, x: Tensor, y: Tensor, shared: _Shared, pages: tuple[Tensor, Tensor], attention_input: Tensor | None
    ) -> None:
        """Read the rows from `x`, and write the output to `y`."""
        keys, values = (each.data_ptr() for each in pages)
        if self._norm is not None:
            self._norm.arguments[0] = x.data_ptr()
        if attention_input is not None:
            self._qkv.read(attention_input.data_ptr())
        self._rotary.arguments[1:6] = [shared.cos, shared.sin, keys, values, shared.cells]
        tables = shared.table, shared.row_table, shared.scores
        self._attention.arguments[1:9] = [keys, values, *tables, *shared.sizes]
        self._output.add(x.data_ptr())
        self._down.write(y.data_ptr())


def _norm(norm: Any) -> tuple[Tensor, float]:
    """Weight and epsilon of an RMS norm."""
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if epsilon is None or not isinstance(getattr(norm, "weight", None), Tensor):
        raise UnknownPartError("a norm without a weight and an epsilon")
    return norm.weight.detach(), float(epsilon)


def _packed(linear: nn.Module) -> PackedLinear:
    """The packed layer, or that of the layers joined with it."""
    whole = linear.joined.packed if isinstance(linear, JoinedPart) else linear
    if not isinstance(whole, PackedLinear) or not isinstance(whole.packed, PackedWeight) or whole.min_rows > 1:
        raise UnknownPartError("a projection whose weight is not packed as stored")
    return whole
