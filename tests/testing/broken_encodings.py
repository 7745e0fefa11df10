"""Encodings that break the laws of calls that follow one another, on purpose."""

import torch

import longitude as lg


class OnlyForSeveral(lg.ClippedBias):
    """Its table goes in where there are several tokens."""

    def terms(self, context):
        def at(offset):
            table = self.table if offset.numel() > 1 else self.table.detach()
            return table[:, offset.clamp(-9, 9) + 127]

        return (lg.OffsetBias(at),)


class MadeInInference(lg.ClippedBias):
    """Keeps what it made in inference_mode, and multiplies with it later."""

    made = 2.0

    def terms(self, context):
        if torch.is_inference_mode_enabled():
            self.made = torch.full((), 2.0, dtype=torch.float64)
        return (lg.OffsetBias(lambda offset: self.made * self.table[:, offset.clamp(-9, 9) + 127]),)


class CountsByItself(lg.FoX):
    """Its sums run on in itself, whatever its caches were given."""

    carries = False

    def context(self, x, carry=None, documents=None):
        before = getattr(self, "sums", None) if x.shape[1] < 9 else None
        before = None if before is not None and len(before) != len(x) else before
        columns, self.sums = super().context(x, before, documents)
        return columns, None


class HidesItsState(lg.FoX):
    carries = False
