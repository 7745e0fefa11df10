"""Position from a convolution of the input, for encoders: what is added to a token depends on its neighbors on both sides."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longitude.errors import UsageError
from longitude.positions.absolute import AtInput
from longitude.positions.base import register


@register("convolutional")
class Convolutional(AtInput):
    """wav2vec 2.0, a convolution of the input: x + gelu(conv(x)), grouped, with weight normalization, over both sides.

    Positions are not read: the order of tokens decides, and the zeros before the first token and after the last. Documents are
    convolved as if alone. For encoders; a decoder cannot attend to later tokens.

    Args:
        dim: width of x.
        kernel: tokens under the convolution; if it is even, one more of them comes before the token than after it.
        groups: groups of channels; they divide dim.

    Raises:
        ValueError: groups that do not divide dim.

    Source:
        Baevski et al. 2020, arXiv 2006.11477, https://arxiv.org/abs/2006.11477
    """

    source = "Baevski et al. 2020, https://arxiv.org/abs/2006.11477"
    relative = learned = reads_neighbors = True

    def __init__(self, dim: int, kernel: int = 128, groups: int = 16):
        super().__init__()
        if dim % groups:
            raise UsageError("Convolutional", "groups to divide dim", f"{groups} and {dim}")
        self.dim, self.kernel, self.groups = dim, kernel, groups
        self.size, self.direction = (
            nn.Parameter(torch.empty(*shape, kernel)) for shape in ((1, 1), (dim, dim // groups))
        )
        self.shift = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.direction.normal_(std=2 / math.sqrt(self.kernel * self.dim))
        self.size.copy_(self.direction.norm(dim=(0, 1), keepdim=True))
        nn.init.zeros_(self.shift)

    def embed(self, x: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        self.positions_of(x, positions)
        dtype, length, before = torch.promote_types(x.dtype, torch.float32), x.shape[1], self.kernel // 2
        with torch.autocast(x.device.type, enabled=False):
            size, direction, shift = (p.to(dtype) for p in (self.size, self.direction, self.shift))
            weight = size * direction / direction.norm(dim=(0, 1), keepdim=True)
            if documents is None:
                added = F.conv1d(x.mT.to(dtype), weight, shift, padding=before, groups=self.groups)[..., :length]
                return x + F.gelu(added).mT.to(x.dtype)
            # Tap by tap, with zeros for neighbors of other documents: counting the documents would stop the device.
            ends = before, self.kernel - 1 - before
            near, ids, added = F.pad(x.mT.to(dtype), ends), F.pad(documents, ends, value=-1), shift[:, None]
            for tap in range(self.kernel):
                same = (ids[:, tap : tap + length] == documents) & (documents >= 0)
                neighbors = near[..., tap : tap + length].where(same[:, None], 0.0)
                added = added + F.conv1d(neighbors, weight[..., tap : tap + 1], groups=self.groups)
            return x + F.gelu(added).mT.to(x.dtype)
