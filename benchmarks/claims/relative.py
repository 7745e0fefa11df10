"""Claims about what relative encodings are made of: values, and one number per distance."""

from functools import partial

from claims.base import Claim, register
from claims.benches import scores_fall, time_below
from claims.evidence import Measured
from claims.extrapolation import RUNG
from claims.statements import loss_at_most

shaw = partial(Measured, "shaw")

register(
    Claim(
        name="shaw-values",
        title="Shaw's vectors of the values",
        number="6a",
        claimed="Relative vectors of the values add nothing to those of the keys.",
        source="Shaw, Uszkoreit and Vaswani 2018, Self-Attention with Relative Position Representations, section 4.3",
        link="https://arxiv.org/abs/1803.02155",
        protocol="There: translation (WMT 2014), 6 + 6 layers of width 512, clipped at 16: keys alone may be "
        f"enough, one run each. {RUNG}",
        statements=(loss_at_most(shaw("shaw:values=false", 128), shaw("shaw", 128)),),
    )
)
register(
    Claim(
        name="t5-bias",
        title="Loss of the T5 bias against Shaw's vectors",
        number="6b",
        claimed="One learned number per head and distance (T5) is as good as vectors of the keys and values (Shaw).",
        source="Raffel et al. 2020, Exploring the Limits of Transfer Learning, section 2.1",
        link="https://arxiv.org/abs/1910.10683",
        protocol=f"There: introduced as the simpler form, without a comparison. {RUNG}",
        statements=(loss_at_most(shaw("t5", 128), shaw("shaw", 128)),),
    )
)
register(
    Claim(
        name="t5-cost",
        title="Time of the T5 bias against Shaw's vectors",
        number="6c",
        claimed="T5's number per head and distance is cheaper than Shaw's vectors.",
        source="Raffel et al. 2020, section 2.1",
        link="https://arxiv.org/abs/1910.10683",
        protocol="Forward and backward of one attention on two cores, each by this library's fastest way, from the "
        "committed bench: time over attention without an encoding in the same turns.",
        statements=tuple(
            time_below(
                "", {"name": "t5", "length": length}, {"name": "shaw", "length": length},
                passed="forward+backward", backend="table",
            )
            for length in (2048, 4096)
        ),
    )
)  # fmt: skip

register(
    Claim(
        name="rope-decay",
        title="RoPE's scores by distance",
        number="16",
        claimed="With RoPE, scores decay with distance.",
        source="Su et al. 2021, RoFormer, section 3.4; denied by Barbero et al. 2025, Round and Round We Go",
        link="https://arxiv.org/abs/2410.06205",
        protocol="There: a bound that falls with the distance; the others show queries and keys for which no score falls. Here: "
        "mean scores before the softmax of trained models of 0.1 million parameters, by distance. Attention may fall since near "
        "text says more. So queries and keys are shuffled among the positions as well, each by itself: what then falls is the "
        "encoding's own. Without an encoding nothing is left of it.",
        statements=tuple(
            statement
            for label in ("rope:base=72", "rope")
            for statement in (
                scores_fall(label, shuffled=False),
                scores_fall(label, shuffled=True),
                scores_fall(label, shuffled=True, more_than="nope"),
            )
        ),
    )
)
