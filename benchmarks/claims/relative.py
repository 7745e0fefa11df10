"""Claims about what relative encodings are made of: values, and one number per distance."""

from functools import partial

from claims.base import Claim, Clause, register
from claims.benches import scores_fall, time_below
from claims.evidence import Measured
from claims.extrapolation import RUNG
from claims.statements import loss_at_most

shaw = partial(Measured, "shaw")
ROPE = ("rope:base=72", "rope")

register(
    Claim(
        name="shaw-values",
        title="Shaw's vectors of the values",
        number="6a",
        clauses=(
            Clause(
                "Without relative vectors of the values, Shaw's encoding has a loss less than 2% higher.",
                a=(loss_at_most(shaw("shaw:values=false", 128), shaw("shaw", 128)),),
            ),
        ),
        source="Shaw, Uszkoreit and Vaswani 2018, Self-Attention with Relative Position Representations, section 4.3",
        link="https://arxiv.org/abs/1803.02155",
        protocol="There: translation (WMT 2014), 6 + 6 layers of width 512, clipped at 16: keys alone may be "
        f"enough, one run each. {RUNG}",
    )
)
register(
    Claim(
        name="t5-cost",
        title="Time of the T5 bias against Shaw's vectors",
        number="6c",
        clauses=(
            Clause(
                "T5's number per head and distance takes less time than Shaw's vectors.",
                b=tuple(
                    time_below(
                        "", {"name": "t5", "length": length}, {"name": "shaw", "length": length},
                        passed="forward+backward", backend="table",
                    )
                    for length in (2048, 4096)
                ),
            ),
        ),
        published=False,
        source="Raffel et al. 2020, section 2.1",
        link="https://arxiv.org/abs/1910.10683",
        protocol="There: no measurement. Here: forward and backward of one attention on two cores, each by this library's "
        "fastest way, from the committed bench: time over attention without an encoding in the same turns.",
        costs="Another machine: on this one the two differ by 1% at 4,096, which more turns would not decide.",
    )
)  # fmt: skip

register(
    Claim(
        name="rope-decay",
        title="RoPE's scores by distance",
        number="16",
        clauses=(
            Clause(
                "In trained models with RoPE, the mean score falls with the distance,",
                a=tuple(scores_fall(label, shuffled=False) for label in ROPE),
            ),
            Clause(
                "also of queries and keys that are shuffled among the positions;",
                a=tuple(scores_fall(label, shuffled=True) for label in ROPE),
            ),
            Clause(
                "before training it does not.",
                a=tuple(scores_fall(label, shuffled, untrained=True) for label in ROPE for shuffled in (False, True)),
            ),
        ),
        source="Su et al. 2021, RoFormer, section 3.4; denied by Barbero et al. 2025, Round and Round We Go",
        link="https://arxiv.org/abs/2410.06205",
        protocol="There: a bound that falls with the distance; the others show queries and keys for which no score falls. Here: "
        "mean scores before the softmax of trained models of 0.1 million parameters, by distance. Attention may fall since near "
        "text says more, so queries and keys are shuffled among the positions as well, each by itself. What then falls is the "
        "score of the mean query and the mean key that were learned: in the same models before training, five seeds, 0 lies in "
        "the interval at every distance. So the fall is learned, and not the encoding's own. Whether scores must fall is not "
        "tested. The margin before training was set when its rows were known.",
    )
)
