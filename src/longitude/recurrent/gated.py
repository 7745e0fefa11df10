"""LSTM and GRU as mixers, by torch's kernels: one token after the other."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from longitude.attention.mixer import register_mixer
from longitude.attention.state_mixer import StateInputs, StateMixer
from longitude.native.derivatives import readable
from longitude.recurrent.ops.checks import require_state, state_dtype


class GatedMixer(StateMixer):
    """out = W_o h_t, with h from torch.lstm or torch.gru. A subclass defines that call and a single step.

    The state is that of the layer, tensors [B, inner]: zeros at the start of a document, unchanged by padding.
    """

    growth = "O(1)"
    saturates = True
    carried: ClassVar[int]
    """Number of tensors of the state."""
    gates: ClassVar[int]

    def __init__(self, dim: int, *, inner: int | None = None):
        super().__init__()
        inner = dim if inner is None else inner
        self.dim, self.inner = dim, inner
        # Parameters, not torch.nn.LSTM or GRU, which torch.compile does not support (torch 2.13).
        self.weight_ih_l0, self.weight_hh_l0 = (nn.Parameter(torch.empty(self.gates * inner, n)) for n in (dim, inner))
        self.bias_ih_l0, self.bias_hh_l0 = (nn.Parameter(torch.empty(self.gates * inner)) for _ in range(2))
        self.output = nn.Linear(inner, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize as torch.nn.LSTM and GRU do."""
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -(self.inner**-0.5), self.inner**-0.5)

    def run(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run all tokens by torch's kernel; return h of each, and the state after the last."""
        raise NotImplementedError

    def step(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The state after a token. x: W_x x_t + b_x, [B, gates inner]."""
        raise NotImplementedError

    def mix(self, x: Tensor, state: Any, inputs: StateInputs) -> tuple[Tensor, tuple[Tensor, ...]]:
        kept = state_dtype(x)
        require_state(type(self).__name__, state, dict.fromkeys(("h", "c")[: self.carried], (len(x), self.inner)))
        state = tuple(x.new_zeros(len(x), self.inner) for _ in range(self.carried)) if state is None else state
        state = tuple(part.to(x.dtype) for part in state)
        if inputs.reset is None and inputs.valid is None and readable(x):  # vmap does not support torch's kernels
            h, state = self.run(x, tuple(part[None].contiguous() for part in state))
        else:
            h, state = self._steps(x, state, inputs.reset, inputs.valid)
        return self.output(h), tuple(part.to(kept) for part in state)

    def _steps(
        self, x: Tensor, state: tuple[Tensor, ...], reset: Tensor | None, valid: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run token by token. reset: starts of documents. valid: tokens that are no padding."""
        out = []
        every = nn.functional.linear(x, self.weight_ih_l0, self.bias_ih_l0)
        for t in range(x.shape[1]):
            if reset is not None:
                state = tuple(part.masked_fill(reset[:, t, None], 0) for part in state)
            after = self.step(every[:, t], state)
            if valid is not None:
                after = tuple(torch.where(valid[:, t, None], new, old) for new, old in zip(after, state, strict=True))
            state = after
            out.append(state[0])
        return torch.stack(out, 1), state

    @property
    def weights(self) -> list[Tensor]:
        """Weights in the order of torch.lstm and torch.gru."""
        return [self.weight_ih_l0, self.weight_hh_l0, self.bias_ih_l0, self.bias_hh_l0]

    def recurrent(self, h: Tensor) -> Tensor:
        """U h + its bias."""
        return nn.functional.linear(h, self.weight_hh_l0, self.bias_hh_l0)


@register_mixer("lstm")
class LSTM(GatedMixer):
    """Long short-term memory: a cell that gates write, keep and read.

        i, f, o = sigmoid(W x_t + U h_{t-1} + b),   g = tanh(the same with its own W, U, b)
        c_t = f c_{t-1} + i g,   h_t = o tanh(c_t),   out = W_o h_t

    The state is h and c, [B, inner] each. Names of parameters, their initial values and two biases per gate are torch.nn.LSTM's.

    Args:
        dim: width of x and of the output.
        inner: width of h; None: dim.

    Raises:
        ValueError: for sizes that are not positive.

    Source:
        Hochreiter and Schmidhuber 1997, https://doi.org/10.1162/neco.1997.9.8.1735; with the forget gate of Gers et al. 2000.
    """

    source = "Hochreiter and Schmidhuber 1997"
    carried, gates = 2, 4

    def run(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        mixed = x.is_cpu and torch.is_autocast_enabled("cpu")
        if mixed:  # torch would call an LSTM of oneDNN that processors without AVX-512 do not support
            x, state = x.to(self.weight_ih_l0.dtype), tuple(part.to(self.weight_ih_l0.dtype) for part in state)
        with torch.autocast("cpu", enabled=False) if mixed else nullcontext():
            h, *after = torch.lstm(x, state, self.weights, True, 1, 0.0, self.training, False, True)
        return h, tuple(part[0] for part in after)

    def step(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        h, c = state
        i, f, g, o = (x + self.recurrent(h)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


@register_mixer("gru")
class GRU(GatedMixer):
    """Gated recurrent unit: a gate mixes the state with a new candidate.

        r, z = sigmoid(W x_t + U h_{t-1} + b),   n = tanh(W_n x_t + b_n + r (U_n h_{t-1} + c_n))
        h_t = (1 - z) n + z h_{t-1},   out = W_o h_t

    The state is h, [B, inner]. Names of parameters and their initial values are torch.nn.GRU's; r multiplies U_n h, as there;
    in the paper it is U_n (r h).

    Args:
        dim: width of x and of the output.
        inner: width of h; None: dim.

    Raises:
        ValueError: for sizes that are not positive.

    Source:
        Cho et al. 2014, arXiv 1406.1078, https://arxiv.org/abs/1406.1078
    """

    source = "Cho et al. 2014"
    carried, gates = 1, 3

    def run(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        h, after = torch.gru(x, state[0], self.weights, True, 1, 0.0, self.training, False, True)
        return h, (after[0],)

    def step(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        [h] = state
        r, z, n = x.chunk(3, -1)
        of_r, of_z, of_n = self.recurrent(h).chunk(3, -1)
        z = (z + of_z).sigmoid()
        return ((1 - z) * torch.tanh(n + (r + of_r).sigmoid() * of_n) + z * h,)
