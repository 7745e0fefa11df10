"""Claims about the loss on text longer than that of training, without any change of the model."""

from functools import partial

from claims.base import Claim, Clause, register
from claims.evidence import Measured
from claims.statements import level, loss_at_most, loss_below, loss_within, more_accurate, rises

ladder_a, ladder_b = partial(Measured, "ladder-a"), partial(Measured, "ladder-b")
tables, early, base, recall = (partial(Measured, study) for study in ("tables", "early", "base", "recall-qk"))
LENGTHS = (256, 512, 1024, 2048)
"""2, 4, 8 and 16 times the training length."""
FLAT = 0.01
"""Sliding windows stay as they are: in the paper's table 15 the loss, the logarithm of the perplexity, rises by up to 0.9%."""
GAIN = 0.002
"""And they improve by less than this, a quarter of what windows that do not overlap gained at twice the length in a first run."""
RUNG = (
    "Here: bytes of Python, models of 0.1 million parameters, 4 million bytes of training at 128, five seeds, the best of four "
    "rates."
)
LARGER = "ladder-b: 0.4 million parameters, trained at 256, one rate."
NEXT = (512, 1024, 4096)
"""Of the next rung, which is trained at 256: 2, 4 and 16 times."""
HEADS = (
    "ALiBi has two heads there, with slopes 1/16 and 1/256, and is no better at 128 than a model that sees 63 bytes: it learned "
    "too little. With four (study heads) it is 0.01 bits better, and level. The next size has four."
)
UNLEARNED = "At B {} learned no more than a model that sees 127 bytes. Four rates, twice the steps: {} processor hours."
SINUSOIDS = "Sinusoids that see 63 bytes are as good. Four rates at 0.4 million parameters take 6 processor hours."

PRESS = "Press, Smith and Lewis 2022, Train Short, Test Long"
PRESS_LINK = "https://arxiv.org/abs/2108.12409"

register(
    Claim(
        name="tables-alike",
        title="Learned table and sinusoids at the training length",
        number="1a",
        clauses=(
            Clause(
                "At the training length, a learned table of positions and sinusoids have losses within 2%.",
                a=(loss_within(tables("sinusoidal", 128), tables("learned", 128)),),
            ),
        ),
        source="Vaswani et al. 2017, Attention Is All You Need, table 3, row E",
        link="https://arxiv.org/abs/1706.03762",
        protocol="There: translation, an encoder-decoder of 65 million parameters, sentences; results within a "
        f"tenth of a BLEU point. {RUNG}",
        costs=SINUSOIDS,
    )
)
register(
    Claim(
        name="tables-fail",
        title="Sinusoids past the training length",
        number="1b",
        clauses=(
            Clause(
                "With sinusoids, the loss rises past the training length.",
                a=tuple(rises(ladder_a("sinusoidal", length), at=128) for length in LENGTHS),
            ),
        ),
        source=PRESS + ", sections 2 and B",
        link=PRESS_LINK,
        protocol="There: 247 million parameters, WikiText-103; trained at 512, the perplexity of sinusoids rises "
        f"from 18 to 204 at 1,024, in sliding windows. {RUNG}",
    )
)
register(
    Claim(
        name="alibi-holds",
        title="ALiBi past the training length",
        number="2a",
        clauses=(
            Clause(
                "With ALiBi, the loss does not get worse at up to 16 times the training length.",
                a=tuple(level(ladder_a("alibi", length), at=128) for length in LENGTHS),
                b=(
                    loss_at_most(early("alibi", 512, "sliding"), early("alibi", 256, "sliding")),
                    *(level(ladder_b("alibi", length), at=256) for length in NEXT[1:]),
                ),
            ),
        ),
        source=PRESS,
        link=PRESS_LINK,
        protocol="There: 247 million parameters, WikiText-103, trained at 512, tested to 10,000 tokens, about 20 "
        f"times as many; windows that do not overlap. {RUNG} {HEADS} {LARGER} At twice the length, windows slide there: half of "
        "a window that does not overlap has the contexts of training, short ones too, and the end of a training window has none. "
        "That was decided after the rows were known. Varied: the planned statement, and whole windows against whole ones.",
        varied=(level(ladder_b("alibi", 512), at=256), loss_at_most(ladder_b("alibi", 512), ladder_b("alibi", 256))),
    )
)
register(
    Claim(
        name="early-tokens",
        title="ALiBi in sliding and in non-overlapping windows",
        number="2b",
        clauses=(
            Clause(
                "ALiBi's gain at longer lengths is of the evaluation: windows that do not overlap improve with their length,",
                b=tuple(loss_below(early("alibi", length), early("alibi", 256)) for length in (512, 1024)),
            ),
            Clause(
                "and sliding windows do not.",
                b=tuple(
                    loss_within(early("alibi", length, "sliding"), early("alibi", 256, "sliding"), FLAT, GAIN)
                    for length in (512, 1024)
                ),
            ),
        ),
        source=PRESS + ", section B.2 and tables 13 to 15",
        link=PRESS_LINK,
        protocol="There: 247 million parameters, WikiText-103, trained at 512, tested to 3,072; in windows that "
        "slide by one token the loss stays within 1%. Here: bytes of Python, models of 0.4 million parameters, 16 million bytes "
        "of training at 256, one rate, five seeds. Windows slide by 64 bytes, and have up to 4 times the training length. Flat "
        f"is at most {FLAT:.0%} above, the paper's own range, and {GAIN:.1%} below, as before.",
    )
)
register(
    Claim(
        name="rope-breaks",
        title="RoPE past the training length",
        number="3a",
        clauses=(
            Clause(
                "With RoPE, without QK-norm, the loss rises from twice the training length on.",
                a=tuple(rises(ladder_a("rope:base=72", length), at=128) for length in LENGTHS),
                b=tuple(rises(ladder_b("rope:base=194", length), at=256) for length in NEXT),
            ),
        ),
        source="Chen et al. 2023, Extending Context Window of Large Language Models via Positional Interpolation, table 1; "
        + PRESS,
        link="https://arxiv.org/abs/2306.15595",
        protocol="There: LLaMA of 7 billion parameters, trained at 2,048, perplexity 7.2 there and more than 1,000 "
        f"at 4,096 (PG-19, sliding windows). {RUNG} {LARGER} The base follows from the training length, as in published "
        "models. Models of today have QK-norm (claim 21a). Varied: base 10,000.",
        varied=tuple(rises(ladder_a("rope", length), at=128) for length in LENGTHS),
    )
)
YANG, YANG_LINK = (
    "Yang et al. 2025, Rope to Nope and Back Again, version 2, table 2",
    "https://arxiv.org/abs/2501.18795",
)
YANG_THERE = (
    "There: 8 billion parameters, validation losses of 1.52 and, with QK-norm, 1.53 nats; needles at 65,000 tokens, which later "
    "training reached, score 9.82 and 7.93."
)
QK = "+attention:qk_norm=true"
BASES = {"a": "rope:base=72", "b": "rope:base=194"}
"""RoPE of `ladder-a` and of `ladder-b`, each with the base of its training length."""
register(
    Claim(
        name="qk-norm-loss",
        title="Loss of RoPE with QK-norm",
        number="21a",
        clauses=(
            Clause(
                "At the training length, RoPE with QK-norm has a loss within 2% of that without,",
                a=(loss_within(ladder_a(BASES["a"] + QK, 128), ladder_a("rope:base=72", 128)),),
                b=(loss_within(ladder_b(BASES["b"] + QK, 256), ladder_b("rope:base=194", 256)),),
            ),
            Clause(
                "and at twice that length a lower one.",
                a=(loss_below(ladder_a(BASES["a"] + QK, 256), ladder_a("rope:base=72", 256)),),
                b=(loss_below(ladder_b(BASES["b"] + QK, 512), ladder_b("rope:base=194", 512)),),
            ),
        ),
        source=YANG + "; its second half was found here",
        link=YANG_LINK,
        protocol=f"{YANG_THERE} {RUNG} {LARGER} Qwen3, Gemma 3 and OLMo 2 have QK-norm. Varied: the rise of RoPE with QK-norm.",
        costs="At B RoPE of 4,000 steps at one rate is not below the blind control, nor below one seed of a control of its own, "
        "RoPE in a window of 64 (1.780 bits, RoPE 1.794). Four rates and twice the steps of three labels: 28 processor hours.",
        varied=tuple(rises(ladder_a(BASES["a"] + QK, length), at=128) for length in LENGTHS),
    )
)
register(
    Claim(
        name="qk-norm-retrieval",
        title="Recall of RoPE with QK-norm",
        number="21b",
        clauses=(
            Clause(
                "With QK-norm, RoPE recalls less often past the training length than without.",
                a=tuple(more_accurate(recall("rope", n), recall("rope" + QK, n)) for n in (128, 256, 512)),
            ),
        ),
        source=YANG,
        link=YANG_LINK,
        protocol=f"{YANG_THERE} Here: 4 pairs in 64 symbols, five seeds. The lengths 256 and 512 and two seeds were added "
        "when three at 128 were known. Passkeys (passkey-qk): 16% without and 2% with QK-norm at 128, undecided; none at 256.",
        costs="About 16 more seeds: 65 processor minutes.",
    )
)
LIU, LIU_LINK = "Liu et al. 2024, Scaling Laws of RoPE-based Extrapolation", "https://arxiv.org/abs/2310.05209"
LIU_THERE = (
    "There: Llama 2 of 7 and 13 billion parameters, fine-tuned with bases from 500 to 1,000,000 and more; how far each reaches "
    "follows from its longest wavelengths. Our study has no losses of quarters of a window; a rise over a whole one, which has "
    "short contexts, is a rise."
)
register(
    Claim(
        name="small-base",
        title="RoPE with small bases",
        number="3b",
        clauses=(
            Clause(
                "With a base far below the training length, RoPE predicts longer text better than with base 10,000,",
                a=tuple(loss_below(base("rope:base=16", length), base("rope", length)) for length in LENGTHS),
            ),
            Clause(
                "and with every base that was tried, 16 to 500,000, its loss rises at 4 times the length.",
                a=tuple(
                    rises(base(label, 512), at=128, method=None)
                    for label in (*(f"rope:base={value}" for value in (16, 72, 500, 500_000)), "rope")
                ),
            ),
        ),
        source=LIU,
        link=LIU_LINK,
        protocol=f"{LIU_THERE} {RUNG} Far below is less than T/(2 pi), 20 at T = 128, where every pair turns at least once: "
        "base 16, which has the share of turning pairs that 388 has at 4,096. The best rate of 500 is the highest tried.",
    )
)
register(
    Claim(
        name="large-base",
        title="RoPE with a large base",
        number="3c",
        clauses=(
            Clause(
                "With a base far above the usual one, RoPE predicts text of twice the training length better,",
                a=(loss_below(base("rope:base=500", 256), base("rope:base=72", 256)),),
            ),
            Clause("and its loss rises.", a=(rises(base("rope:base=500", 256), at=128, method=None),)),
        ),
        source=LIU,
        link=LIU_LINK,
        protocol=f"{LIU_THERE} {RUNG} Usual is 72, which has the share of turning pairs at 128 that 10,000 has at 4,096; far "
        "above is 500, which is 600,000 there. Varied: 500,000 and 10,000, which are 2e12 and 4e8 there, where nobody works.",
        costs="About 44 seeds of two bases: 350 processor minutes.",
        varied=(
            loss_below(base("rope:base=500000", 256), base("rope", 256)),
            loss_below(base("rope:base=500000", 256), base("rope:base=72", 256)),
        ),
    )
)
CHI = "Chi, Fan, Ramadge and Rudnicky 2022, KERPLE"
register(
    Claim(
        name="kerple",
        title="KERPLE against ALiBi past the training length",
        number="8a",
        clauses=(
            Clause(
                "KERPLE's logarithmic bias predicts text past the training length better than ALiBi,",
                a=tuple(loss_below(ladder_a("kerple_log", length), ladder_a("alibi", length)) for length in LENGTHS),
                b=tuple(loss_below(ladder_b("kerple_log", length), ladder_b("alibi", length)) for length in NEXT),
            ),
            Clause(
                "and does not get worse.",
                a=tuple(level(ladder_a("kerple_log", length), at=128) for length in LENGTHS),
                b=tuple(level(ladder_b("kerple_log", length), at=256) for length in NEXT),
            ),
        ),
        source=CHI,
        link="https://arxiv.org/abs/2205.09921",
        protocol="There: 162 million parameters, trained at 512 on OpenWebText2, GitHub and ArXiv, tested to 16,384 "
        f"tokens. {RUNG} {HEADS} {LARGER}",
        costs=UNLEARNED.format("KERPLE", 28),
    )
)
register(
    Claim(
        name="sandwich",
        title="Sandwich against ALiBi at the longest texts",
        number="8b",
        clauses=(
            Clause(
                "Sandwich, without parameters, predicts the longest texts better than ALiBi,",
                a=(loss_below(ladder_a("sandwich", 2048), ladder_a("alibi", 2048)),),
            ),
            Clause("and does not get worse.", a=(level(ladder_a("sandwich", 2048), at=128),)),
        ),
        source="Chi, Fan, Rudnicky and Ramadge 2023, Dissecting Transformer Length Extrapolation",
        link="https://arxiv.org/abs/2212.10356",
        protocol="There: 162 million parameters, trained at 512 on OpenWebText2, GitHub and ArXiv, tested to 8,192 "
        f"tokens. {RUNG} {HEADS}",
        costs="At B, where other encodings learned too little: four rates and twice the steps take 28 processor hours.",
    )
)
register(
    Claim(
        name="fire",
        title="FIRE against ALiBi up to 4 times the training length",
        number="8c",
        clauses=(
            Clause(
                "FIRE predicts text of up to 4 times the training length better than ALiBi,",
                a=tuple(loss_below(ladder_a("fire", length), ladder_a("alibi", length)) for length in (256, 512)),
            ),
            Clause(
                "and does not get worse.", a=tuple(level(ladder_a("fire", length), at=128) for length in (256, 512))
            ),
        ),
        source="Li et al. 2024, Functional Interpolation for Relative Positions Improves Long Context Transformers",
        link="https://arxiv.org/abs/2310.04418",
        protocol="There: 125 and 350 million parameters, trained at 2,048 on C4, tested to 8,192 tokens: 2.28 less "
        f"perplexity than the best other encoding. {RUNG} {HEADS}",
    )
)
register(
    Claim(
        name="fox-holds",
        title="FoX past the training length",
        number="10c",
        clauses=(
            Clause(
                "With the forget gate (FoX), the loss does not get worse at up to 4 times the training length.",
                a=tuple(level(ladder_a("fox", length), at=128) for length in (256, 512)),
                b=tuple(level(ladder_b("fox", length), at=256) for length in (512, 1024)),
            ),
        ),
        source="Lin et al. 2025, Forgetting Transformer",
        link="https://arxiv.org/abs/2503.02130",
        protocol="There: 760 million parameters, trained at 16,384 tokens of LongCrawl64, tested to 65,536, 4 times "
        f"as many. {RUNG} {LARGER} A model that sees 63 bytes does not get worse either.",
        costs=UNLEARNED.format("FoX", 19),
    )
)
