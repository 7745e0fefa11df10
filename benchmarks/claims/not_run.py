"""Claims that were not run, each with what it would take. Times are of two cores."""

from claims.base import Claim, register

register(
    Claim(
        name="path-a5",
        title="PaTH and RoPE on the group A5",
        number="10d",
        claimed="PaTH solves the word problem of the group A5 with fewer layers than RoPE.",
        source="Yang et al. 2025, PaTH Attention",
        link="https://arxiv.org/abs/2505.16381",
        protocol="The task `a5` is there, and products of four elements are learned (two layers of width 128, a learned "
        "table, 10,000 steps of 256: 20 minutes). Which encoding needs fewer layers shows at longer products: of 8 and more, "
        "6 models of hours each, or a GPU.",
    )
)
register(
    Claim(
        name="rope-decay",
        title="RoPE's attention by distance",
        number="16",
        claimed="With RoPE, attention decays with distance.",
        source="Su et al. 2021, RoFormer, section 3.4; denied by Barbero et al. 2025, Round and Round We Go",
        link="https://arxiv.org/abs/2410.06205",
        protocol="It takes scores by distance of trained models, of queries and keys as they are and shuffled, which no "
        "study measures yet. The models of the study `text` would do, in minutes.",
    )
)
