"""Claims about the loss on text longer than that of training, without any change of the model."""

from functools import partial

from claims.base import Claim, register
from claims.evidence import Measured
from claims.statements import any_of, breaks, holds, lead_grows, loss_below, loss_within, reaches_further

ladder_a, ladder_b = partial(Measured, "ladder-a"), partial(Measured, "ladder-b")
tables, early, base = (partial(Measured, study) for study in ("tables", "early", "base"))
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
NEXT = (512, 1024, 4096)
"""Of the next rung, which is trained at 256: 2, 4 and 16 times."""
HEADS = "ALiBi has two heads there, with slopes 1/16 and 1/256, and is 19% above the best label at 128."

PRESS = "Press, Smith and Lewis 2022, Train Short, Test Long"
PRESS_LINK = "https://arxiv.org/abs/2108.12409"

register(
    Claim(
        name="tables-alike",
        title="Learned table and sinusoids at the training length",
        number="1a",
        claimed="At the training length a learned table of positions and sinusoids give the same quality.",
        source="Vaswani et al. 2017, Attention Is All You Need, table 3, row E",
        link="https://arxiv.org/abs/1706.03762",
        protocol="There: translation, an encoder-decoder of 65 million parameters, sentences; results within a "
        f"tenth of a BLEU point. {RUNG}",
        statements=(loss_within(tables("sinusoidal", 128), tables("learned", 128)),),
    )
)
register(
    Claim(
        name="tables-fail",
        title="Learned table and sinusoids past the training length",
        number="1b",
        claimed="Sinusoids fail past the training length; a learned table has no rows there at all.",
        source=PRESS + ", sections 2 and B",
        link=PRESS_LINK,
        protocol="There: 247 million parameters, WikiText-103; trained at 512, the perplexity of sinusoids rises "
        f"from 18 to 204 at 1,024, in sliding windows. {RUNG} A study with a learned table raises an error at lengths "
        "that the table has no rows for.",
        statements=tuple(breaks(ladder_a("sinusoidal", length), at=128) for length in LENGTHS),
    )
)
register(
    Claim(
        name="alibi-holds",
        title="ALiBi past the training length",
        number="2a",
        claimed="ALiBi holds its perplexity on texts far longer than those of training.",
        source=PRESS,
        link=PRESS_LINK,
        protocol="There: 247 million parameters, WikiText-103, trained at 512, tested to 10,000 tokens, about 20 "
        f"times as many; windows that do not overlap. {RUNG} To 16 times. {HEADS} The next size has four heads.",
        statements=tuple(holds(ladder_a("alibi", length), at=128) for length in LENGTHS),
        larger=tuple(holds(ladder_b("alibi", length), at=256) for length in NEXT),
    )
)
register(
    Claim(
        name="early-tokens",
        title="ALiBi in sliding and in non-overlapping windows",
        number="2b",
        claimed="ALiBi's gain at longer lengths is an artifact of the evaluation: longer windows have fewer tokens with a "
        "short context. Non-overlapping windows improve with their length, and windows that slide by one token do not.",
        source=PRESS + ", section B.2 and tables 13 to 15",
        link=PRESS_LINK,
        protocol="There: 247 million parameters, WikiText-103, trained at 512, tested to 3,072; in windows that "
        "slide by one token the loss stays within 1%. Here: bytes of Python, models of 0.4 million parameters, 16 million bytes "
        "of training at 256, one rate, three seeds. Windows slide by 64 bytes, and have up to 4 times the training length. Flat "
        f"is at most {FLAT:.0%} above, the paper's own range, and {GAIN:.1%} below, as before.",
        statements=(
            *(loss_below(early("alibi", length), early("alibi", 256)) for length in (512, 1024)),
            *(
                loss_within(early("alibi", length, "sliding"), early("alibi", 256, "sliding"), FLAT, GAIN)
                for length in (512, 1024)
            ),
        ),
    )
)
register(
    Claim(
        name="rope-breaks",
        title="RoPE past the training length",
        number="3a",
        claimed="RoPE breaks at twice the training length.",
        source="Chen et al. 2023, Extending Context Window of Large Language Models via Positional Interpolation, table 1; "
        + PRESS,
        link="https://arxiv.org/abs/2306.15595",
        protocol="There: LLaMA of 7 billion parameters, trained at 2,048, perplexity 7.2 there and more than 1,000 "
        f"at 4,096 (PG-19, sliding windows). {RUNG} The base follows from the training length, as in published models. "
        "Varied: base 10,000.",
        statements=tuple(breaks(ladder_a("rope:base=72", length), at=128) for length in LENGTHS),
        varied=tuple(breaks(ladder_a("rope", length), at=128) for length in LENGTHS),
        larger=tuple(breaks(ladder_b("rope:base=194", length), at=256) for length in NEXT),
    )
)
LIU, LIU_LINK = "Liu et al. 2024, Scaling Laws of RoPE-based Extrapolation", "https://arxiv.org/abs/2310.05209"
LIU_THERE = (
    "There: Llama 2 of 7 and 13 billion parameters, fine-tuned with bases from 500 to 1,000,000 and more; how far each reaches "
    "follows from its longest wavelengths."
)
register(
    Claim(
        name="small-base",
        title="RoPE with a small base",
        number="3b",
        claimed="With a base far below the training length, RoPE predicts longer text better than with base 10,000, "
        "and breaks too.",
        source=LIU,
        link=LIU_LINK,
        protocol=f"{LIU_THERE} {RUNG} Small is below T/(2 pi), 20 at T = 128, where every pair turns at least once: base "
        "16.",
        statements=(
            *(loss_below(base("rope:base=16", length), base("rope", length)) for length in LENGTHS),
            breaks(base("rope:base=16", 2048), at=128),
        ),
    )
)
register(
    Claim(
        name="large-base",
        title="RoPE with a large base",
        number="3c",
        claimed="With a base above 10,000, RoPE predicts text of twice the training length better, and breaks too.",
        source=LIU,
        link=LIU_LINK,
        protocol=f"{LIU_THERE} {RUNG} Base 500,000 from the start.",
        statements=(
            loss_below(base("rope:base=500000", 256), base("rope", 256)),
            breaks(base("rope:base=500000", 2048), at=128),
        ),
    )
)
BASES = tuple(f"rope:base={value}" for value in (16, 72, 500, 500_000))
register(
    Claim(
        name="searched-base",
        title="RoPE with the best of several bases",
        number="3d",
        claimed="With the best of several bases, RoPE holds on longer text than with base 10,000, and breaks too.",
        source="Liu et al. 2024, Scaling Laws of RoPE-based Extrapolation",
        link="https://arxiv.org/abs/2310.05209",
        protocol=f"There: as for 3b and 3c. {RUNG} We train four other bases, each from the start; one must hold at a longer "
        "length than 10,000. Which one is chosen by the measured lengths themselves, in the claim's favor. At some lengths the "
        "last window of a document is shorter: at most 2% of the bytes. Base 16 was added when "
        "claim 3b was known. The best rate of 500 is the highest tried.",
        statements=(
            any_of(
                "one of the bases 16, 72, 500 and 500,000 holds up to a longer length than 10,000",
                *(reaches_further(base(label, 512), base("rope", 512)) for label in BASES),
            ),
            *(breaks(base(label, 512), at=128) for label in BASES),
        ),
    )
)
CHI = "Chi, Fan, Ramadge and Rudnicky 2022, KERPLE"
register(
    Claim(
        name="kerple",
        title="KERPLE against ALiBi past the training length",
        number="8a",
        claimed="KERPLE's logarithmic bias predicts text past the training length better than ALiBi, and holds.",
        source=CHI,
        link="https://arxiv.org/abs/2205.09921",
        protocol="There: 162 million parameters, trained at 512 on OpenWebText2, GitHub and ArXiv, tested to 16,384 "
        f"tokens. {RUNG} {HEADS} Better past the training length than at it: the lead must grow from there. Nearly "
        "the whole lead is there at the training length.",
        statements=(
            *(loss_below(ladder_a("kerple_log", length), ladder_a("alibi", length)) for length in LENGTHS),
            *(lead_grows(ladder_a("kerple_log", length), ladder_a("alibi", length), at=128) for length in LENGTHS),
            holds(ladder_a("kerple_log", 2048), at=128),
        ),
        larger=(
            *(loss_below(ladder_b("kerple_log", length), ladder_b("alibi", length)) for length in NEXT),
            *(lead_grows(ladder_b("kerple_log", length), ladder_b("alibi", length), at=256) for length in NEXT),
            holds(ladder_b("kerple_log", 4096), at=256),
        ),
    )
)
register(
    Claim(
        name="sandwich",
        title="Sandwich against ALiBi at the longest texts",
        number="8b",
        claimed="Sandwich, without parameters, predicts the longest texts better than ALiBi, and holds.",
        source="Chi, Fan, Rudnicky and Ramadge 2023, Dissecting Transformer Length Extrapolation",
        link="https://arxiv.org/abs/2212.10356",
        protocol="There: 162 million parameters, trained at 512 on OpenWebText2, GitHub and ArXiv, tested to 8,192 "
        f"tokens. {RUNG} {HEADS} Better at the longest texts than at the training length: the lead must grow from there.",
        statements=(
            loss_below(ladder_a("sandwich", 2048), ladder_a("alibi", 2048)),
            lead_grows(ladder_a("sandwich", 2048), ladder_a("alibi", 2048), at=128),
            holds(ladder_a("sandwich", 2048), at=128),
        ),
    )
)
register(
    Claim(
        name="fire",
        title="FIRE against ALiBi up to 4 times the training length",
        number="8c",
        claimed="FIRE predicts text of up to 4 times the training length better than ALiBi, and holds.",
        source="Li et al. 2024, Functional Interpolation for Relative Positions Improves Long Context Transformers",
        link="https://arxiv.org/abs/2310.04418",
        protocol="There: 125 and 350 million parameters, trained at 2,048 on C4, tested to 8,192 tokens: 2.28 less "
        f"perplexity than the best other encoding. {RUNG} {HEADS}",
        statements=(
            *(loss_below(ladder_a("fire", length), ladder_a("alibi", length)) for length in (256, 512)),
            *(holds(ladder_a("fire", length), at=128) for length in (256, 512)),
        ),
    )
)
register(
    Claim(
        name="fox-holds",
        title="FoX past the training length",
        number="10c",
        claimed="The forget gate (FoX) holds perplexity past the training length.",
        source="Lin et al. 2025, Forgetting Transformer",
        link="https://arxiv.org/abs/2503.02130",
        protocol="There: 760 million parameters, trained at 16,384 tokens of LongCrawl64, tested to 65,536, 4 times "
        f"as many. {RUNG}",
        statements=tuple(holds(ladder_a("fox", length), at=128) for length in (256, 512)),
        larger=tuple(holds(ladder_b("fox", length), at=256) for length in (512, 1024)),
    )
)
