"""Claims about models past their training length with a RoPE-scaling method, without training and after a short one."""

from functools import partial

from claims.base import Claim, Clause, register
from claims.benches import answers_differ, lowest_loss_answers_less
from claims.evidence import Measured
from claims.extrapolation import RUNG, SINUSOIDS
from claims.statements import loss_at_most, loss_below, loss_within

extension, fine_tuned, tables = (partial(Measured, study) for study in ("extension", "fine-tuned", "tables"))
LENGTHS = (256, 512, 1024)
"""2, 4 and 8 times the training length."""
HERE = (
    "Here: bytes of Python, models of 0.4 million parameters trained at 128, five seeds, windows that do not overlap."
)
BASE = "rope:base=72"
"""A quarter of its pairs never turn within 128, as of Llama 2's within 4,096."""
SWITCHED = BASE + ",scaling={},factor=4"
YARN = SWITCHED.format("yarn") + ",original_max_length=128,beta_fast=5"
UNLEARNED = (
    "RoPE that sees 63 bytes has 2.030 bits, RoPE 2.042. At 256 four rates and twice the steps: 19 processor hours."
)
EXTENDED = f"{HERE} The base, 72, fits 128 bytes as 10,000 fits 4,096 tokens; YaRN's ramp follows the training length."

register(
    Claim(
        name="tables-interpolated",
        title="Interpolated position tables against cropped text",
        number="1c",
        published=False,
        clauses=(
            Clause(
                "With an interpolated table, learned or of sinusoids, a model predicts longer text better than text cropped to "
                "the training length.",
                a=tuple(
                    loss_below(tables(label, length, "linear"), tables(label, 128))
                    for label in ("sinusoidal", "learned")
                    for length in (256, 512)
                ),
            ),
        ),
        source="A chapter of a book on relative positions, of the original Transformer; Dosovitskiy et al. 2021 "
        "interpolate a table for larger images, before training on",
        link="https://arxiv.org/abs/2010.11929",
        protocol=f"There: no measurement without training. {RUNG} Cropped: the same bytes in windows of 128.",
        costs=SINUSOIDS,
    )
)
register(
    Claim(
        name="schemes-in-order",
        title="Position interpolation, NTK-aware scaling and YaRN, without training",
        number="4a",
        clauses=(
            Clause(
                "Without training, NTK-aware scaling of RoPE predicts longer text better than position interpolation,",
                b=tuple(loss_below(extension(BASE, n, "ntk"), extension(BASE, n, "linear")) for n in LENGTHS),
            ),
            Clause(
                "and YaRN better than NTK-aware scaling.",
                b=tuple(loss_below(extension(BASE, n, "yarn"), extension(BASE, n, "ntk")) for n in LENGTHS),
            ),
        ),
        source="bloc97 2023, NTK-Aware Scaled RoPE; Peng et al. 2024, YaRN, section B.3",
        link="https://arxiv.org/abs/2309.00071",
        protocol=f"There: LLaMA and Llama 2 of 7 billion parameters, trained at 2,048 and 4,096, sliding windows. {EXTENDED}",
        costs=UNLEARNED,
    )
)
register(
    Claim(
        name="searched-factors",
        title="Searched factors against YaRN, without training",
        number="4b",
        clauses=(
            Clause(
                "Without training, searched factors of RoPE predict longer text better than YaRN.",
                b=tuple(loss_below(extension(BASE, n, "longrope"), extension(BASE, n, "yarn")) for n in LENGTHS),
            ),
        ),
        source="Ding et al. 2024, LongRoPE, sections 2 and 3",
        link="https://arxiv.org/abs/2402.13753",
        protocol="There: Llama 2 of 7 billion parameters, trained at 4,096; an evolutionary search on five "
        f"documents, at the length that is tested. {EXTENDED} Searched at each length, with 64 candidates for 1,344, on "
        f"the selection text, which is not measured.",
        costs=UNLEARNED,
    )
)
register(
    Claim(
        name="yarn-crops",
        title="YaRN against cropped text, without training",
        number="4c",
        clauses=(
            Clause(
                "Without training, RoPE with YaRN has a loss within 2% of that of text cropped to the training length.",
                b=tuple(loss_within(extension(BASE, n, "yarn"), extension(BASE, 128)) for n in LENGTHS),
            ),
        ),
        source="Gelberg et al. 2025, Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings, figure 5",
        link="https://arxiv.org/abs/2512.12167",
        protocol=f"There: perplexity and retrieval match, models of 0.4 billion parameters and more. {EXTENDED} Cropped: "
        "the same bytes in windows of 128, which have half the context on average.",
        costs=UNLEARNED,
    )
)
register(
    Claim(
        name="yarn-fine-tuned",
        title="YaRN against position interpolation, after training",
        number="5",
        clauses=(
            Clause(
                "After the same 150 steps at the longer length, at one rate, RoPE with YaRN predicts text of it better than with "
                "position interpolation.",
                a=(loss_below(fine_tuned(YARN, 512), fine_tuned(SWITCHED.format("linear"), 512)),),
            ),
        ),
        source="Peng et al. 2024, YaRN, table 1, and figure 3 of a later version",
        link="https://arxiv.org/abs/2309.00071",
        protocol="There: LLaMA of 7 billion parameters, from 2,048 to 32,768 tokens in 400 steps; Llama 2 from "
        "4,096 to 8,192, where both are equal at 8,192. Here: bytes of Python, RoPE with the base of 128, models of 0.1 million "
        "parameters. They go from 128 to 512 bytes in 150 steps at a tenth of the rate, with 4% of the bytes of the first "
        "training; the paper has 0.1%. YaRN's ramp follows the training length. "
        "Linear interpolation has not recovered after them: it is 29% above the model before even at 128. "
        "Varied: the other rows of the same study, no scheme at all and NTK-aware scaling.",
        costs="RoPE that sees 255 bytes has 2.034 bits, with YaRN 2.044. Larger models (rung B) take 90 processor minutes.",
        varied=(
            loss_below(fine_tuned(BASE, 512), fine_tuned(SWITCHED.format("linear"), 512)),
            loss_below(fine_tuned(YARN, 512), fine_tuned(BASE, 512)),
            loss_below(fine_tuned(YARN, 512), fine_tuned(SWITCHED.format("ntk"), 512)),
        ),
    )
)
for name, number, wrong, right, mistake in (
    ("ntk-exponent", "15a", "ntk-book", "ntk", "the exponent 2/(d-2) for d/(d-2) in the base of NTK-aware scaling"),
    ("fractional-positions", "15b", "linear-floor", "linear", "interpolated positions rounded down to whole numbers"),
):
    register(
        Claim(
            name=name,
            title=mistake[0].upper() + mistake[1:],
            number=number,
            published=False,
            clauses=(
                Clause(
                    f"With {mistake}, as in a book, RoPE predicts longer text worse.",
                    b=tuple(loss_below(extension("rope", n, right), extension("rope", n, wrong)) for n in LENGTHS),
                ),
            ),
            source="bloc97 2023, NTK-Aware Scaled RoPE; Chen et al. 2023, Positional Interpolation; docs/errata.md has the "
            "book's formulas",
            link="https://arxiv.org/abs/2306.15595",
            protocol=f"There: no measurement. {HERE}",
            costs=UNLEARNED,
        )
    )
register(
    Claim(
        name="perplexity-retrieval",
        title="Perplexity and retrieval across RoPE-scaling methods",
        number="17",
        clauses=(
            Clause(
                "Across RoPE-scaling methods, equal perplexity need not bring equal retrieval,",
                b=(answers_differ(2048, 0.01, 0.1),),
            ),
            Clause("nor the lowest perplexity the best.", b=(lowest_loss_answers_less(2048),)),
        ),
        source="Peng et al. 2024, YaRN, section B.2; Gelberg et al. 2025, figure 5",
        link="https://arxiv.org/abs/2309.00071",
        protocol="There: models of 0.4 to 7 billion parameters. Here: one Llama of a million parameters, trained at 512 tokens "
        "until it answers eight kinds of questions (benchmarks/retrieval.py). It is extended four times by six schemes, and by "
        "two of them after 200 steps. A single model can show that the two come apart; it cannot show how often they do.",
    )
)
staged, long = partial(Measured, "staged"), partial(Measured, "staged-long")
register(
    Claim(
        name="staged-training",
        title="Short windows first, then long ones",
        number="19",
        clauses=(
            Clause(
                "With RoPE, training on short windows first and on long ones then has a loss less than 2% above that of long "
                "ones alone.",
                a=tuple(loss_at_most(staged(base, 512), long(base, 512)) for base in ("rope:base=72", "rope:base=518")),
            ),
        ),
        source="Press, Smith and Lewis 2021, Shortformer, whose abstract says better, and in less time",
        link="https://arxiv.org/abs/2012.15832",
        protocol="There: WikiText-103, subsequences up to 3,072. Here: RoPE, bytes of Python, models of 0.1 million parameters, "
        "2 million bytes at 128 and 2 million at 512, ten seeds, one learning rate (0.01). Compared with 4 million bytes at "
        "512. Each of two bases is compared with itself: that of 128 bytes (72), and that of 512 bytes (518) from the switch on. "
        "Each half has a warm-up and a decay of its own. Varied: that base, "
        "or a RoPE scaling method, from the switch on, over no change.",
        costs="RoPE that sees 255 bytes has 2.081 bits, RoPE 2.103. Models of 0.4 million parameters take 9 processor hours.",
        varied=tuple(
            loss_below(staged(label, 512), staged("rope:base=72", 512))
            for label in (
                "rope:base=518",
                SWITCHED.format("linear"),
                SWITCHED.format("ntk"),
                YARN,
            )
        ),
    )
)
