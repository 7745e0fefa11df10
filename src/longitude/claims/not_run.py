"""Claims that were not run, each with what it would take. Times are of two cores."""

from longitude.claims.base import Claim, register

register(
    Claim(
        name="temperature",
        number="9b",
        claimed="With a temperature found for each head, a decoder without an encoding carries over to longer texts "
        "than with one.",
        source="Wang et al. 2024, Length Generalization of Causal Transformers without Position Encoding",
        link="https://arxiv.org/abs/2404.12224",
        protocol="It takes temperatures of heads that are tuned after training, which no encoding here has; then a study "
        "like `text` with none, before and after tuning: 3 models, 5 minutes.",
    )
)
register(
    Claim(
        name="path-a5",
        number="10d",
        claimed="PaTH solves the word problem of the group A5 with fewer layers than RoPE.",
        source="Yang et al. 2025, PaTH Attention",
        link="https://arxiv.org/abs/2505.16381",
        protocol="The task `a5` is there. In a few minutes no model of this size learns it, with either encoding: it "
        "takes some 100,000 steps, 6 models of a day each, or a GPU.",
    )
)
register(
    Claim(
        name="grouped-heads",
        number="13",
        claimed="Grouped and multi-query heads have a smaller cache at nearly the same quality; one head for all costs "
        "more of it.",
        source="Ainslie et al. 2023, GQA",
        link="https://arxiv.org/abs/2305.13245",
        protocol="There: T5 of 11 billion parameters, trained on for 5 % of its steps: 47.2 with all heads, 47.1 with 8 "
        "groups, 46.6 with one. It takes an option of a study's model for the heads of keys and values; then 9 "
        "models, 12 minutes.",
    )
)
register(
    Claim(
        name="exact-distance",
        number="14",
        claimed="ALiBi lags behind RoPE where the exact distance matters.",
        source="Repeated of ALiBi in many places; Kazemnejad et al. 2023 find its attention short-sighted",
        link="https://arxiv.org/abs/2305.19466",
        protocol="It takes a task that asks for the symbol a given number of places back, which is not here; then 6 "
        "models, 5 minutes.",
    )
)
register(
    Claim(
        name="rope-decay",
        number="16",
        claimed="With RoPE, attention decays with distance.",
        source="Su et al. 2021, RoFormer, section 3.4; denied by Barbero et al. 2025, Round and Round We Go",
        link="https://arxiv.org/abs/2410.06205",
        protocol="It takes scores by distance of trained models, of queries and keys as they are and shuffled, which no "
        "study measures yet; the models of the study `text` would do: minutes.",
    )
)
register(
    Claim(
        name="perplexity-retrieval",
        number="17",
        claimed="Perplexity does not predict retrieval across schemes.",
        source="Peng et al. 2024, YaRN, section B.2; Gelberg et al. 2025, figure 5",
        link="https://arxiv.org/abs/2309.00071",
        protocol="It takes models that solve a passkey at the training length and read text, then schemes compared by "
        "both: the task `passkey` trains for 3 minutes a model, 12 models, and needs the schemes of the task "
        "`text`.",
    )
)
