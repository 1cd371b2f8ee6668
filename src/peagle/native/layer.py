"""A decoder layer over pages as one call of our CPU kernels: attention and a gated MLP, each with norm and residual.

`NativeLayer` takes its parts from a module of that form, of a target or of a drafter, with the names of the Llama
family. Whoever uses it compares its output with the module's: a norm or a scale may hide something else.

Shapes: N rows, D model width, I width of the attention's input, E head width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from peagle.kernels.attention import PagedRows
from peagle.kernels.joined_linear import JoinedPart, gate_activation
from peagle.native.jit import Calls
from peagle.native.layer_kernels import (
    LANES,
    MAX_LANES,
    MAX_ROWS,
    attention_call,
    gate_call,
    norm_call,
    rotary_call,
)
from peagle.native.packed_linear import PackedLinear
from peagle.native.products import PackedWeight, product_call

LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}


class UnknownPartError(Exception):
    """The layer has other parts than ours, or parts in another form."""


class Workspace:
    """Buffers by name and size, shared by the layers of a model."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int, int], Tensor] = {}

    def buffer(self, name: str, num_rows: int, width: int) -> Tensor:
        key = (name, num_rows, width)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(num_rows, width)
        return self._buffers[key]


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
        self.most_rows = MAX_ROWS
        self.width = int(attention.head_dim)
        self.num_heads = self.output.num_inputs // self.width
        self.num_groups = (self.qkv.num_outputs // self.width - self.num_heads) // 2
        self.scale = float(getattr(attention, "scaling", self.width**-0.5))
        if self.width % (2 * LANES) or self.output.num_outputs % LANES or self.down.num_inputs % LANES:
            raise UnknownPartError(f"widths that are no multiples of {LANES}")
        self._passes: dict[tuple[int, bool], _Pass] = {}

    def run(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        pages: tuple[Tensor, Tensor],
        rows: PagedRows,
        attention_input: Tensor | None = None,
    ) -> Tensor:
        """The layer's output for the rows x [1, N, D]; `attention_input` [1, N, I] replaces the normed rows."""
        num_rows, is_given = x.shape[1], attention_input is not None
        own = self._passes.get((num_rows, is_given))
        if own is None:
            own = self._passes[num_rows, is_given] = _Pass(self, num_rows, is_given)
        return own.run(x.contiguous(), rotary, pages, rows, attention_input)


class _Pass:
    """The calls of a layer for one number of rows. `run` fills in what differs from pass to pass."""

    def __init__(self, layer: NativeLayer, num_rows: int, is_given: bool) -> None:
        """`is_given`: the input of the attention is, and there is no norm before it."""
        self._layer, self._num_rows = layer, num_rows
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
        self._qkv = product_call(given, layer.qkv, qkv, layer.qkv_bias)
        self._rotary = rotary_call(qkv, num_rows, layer.head_norms, **heads)
        self._attention = attention_call(
            qkv, attended, num_rows, scale=layer.scale, window=layer.window, first_key=layer.first_key, **heads
        )
        self._output = product_call(attended, layer.output, total, normed)
        self._down = product_call(gated, layer.down, total, total)
        first = [] if self._norm is None else [self._norm]
        self._calls = Calls(
            [
                *first,
                self._qkv,
                self._rotary,
                self._attention,
                self._output,
                norm_call(total, norm_2, normed, epsilon_2),
                product_call(normed, layer.gate_up, gate_up),
                gate_call(gate_up, gated, layer.activation),
                self._down,
            ]
        )

    def run(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        pages: tuple[Tensor, Tensor],
        rows: PagedRows,
        attention_input: Tensor | None,
    ) -> Tensor:
        assert rows.host is not None, "made by on_host"
        y, (cos, sin), (keys, values) = torch.empty_like(x), rotary, pages
        page_size, (table, cells, row_table) = keys.shape[1], rows.host.for_kernels(rows, self._num_rows)
        cos, sin = cos.contiguous(), sin.contiguous()
        scores = self._layer.workspace.buffer("scores", torch.get_num_threads(), table.shape[1] * page_size + MAX_LANES)
        key_address, value_address = keys.data_ptr(), values.data_ptr()
        if self._norm is not None:
            self._norm.arguments[0] = x.data_ptr()
        if attention_input is not None:
            attention_input = attention_input.contiguous()
            self._qkv.arguments[0] = attention_input.data_ptr()
        self._rotary.arguments[1:6] = [
            cos.data_ptr(),
            sin.data_ptr(),
            key_address,
            value_address,
            cells.data_ptr(),
        ]
        self._attention.arguments[1:7] = [
            key_address,
            value_address,
            table.data_ptr(),
            row_table.data_ptr(),
            scores.data_ptr(),
            scores.shape[1],
        ]
        self._attention.arguments[7:9] = [table.shape[1], page_size]
        self._output.arguments[4] = x.data_ptr()
        self._down.arguments[3] = y.data_ptr()
        self._calls.run()
        return y


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
