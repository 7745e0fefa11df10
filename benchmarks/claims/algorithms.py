"""Claims about tasks with exact answers: copying, flip-flop, word problems, recall, addition."""

from functools import partial

from claims.base import Claim, Clause, register
from claims.benches import time_below
from claims.evidence import Measured
from claims.statements import accuracy_above, accuracy_below, more_accurate, token_time
from longitude.study.answers import SOLVED

copy, randomized, recall = (partial(Measured, study) for study in ("copy-6", "copy-6-randomized", "recall-16"))
flip_flop, flip_flop_long = partial(Measured, "flip-flop-1"), partial(Measured, "flip-flop-long")
parity, parity_of_two = partial(Measured, "parity-1"), partial(Measured, "parity-2")
addition = partial(Measured, "addition")
TWICE = 10
"""Digits of numbers, twice the most of training; the papers test to five times and more."""
LONGER = 9
"""One and a half times the longest trained word: the middle of what the paper tests, up to twice."""
RECURRENCES = ("mamba2", "rwkv6", "retention")
CONSTANT = 1.25
"""Constant in length: below half way from 1 to 1.5, which a cost of log N would reach from 1,024 to 32,768 tokens."""

register(
    Claim(
        name="no-encoding",
        title="NoPE on algorithmic tasks",
        number="9a",
        clauses=(
            Clause(
                "A decoder with NoPE copies longer words better than one with sinusoids, RoPE, ALiBi or the T5 bias.",
                a=tuple(
                    more_accurate(copy("nope", LONGER), copy(other, LONGER))
                    for other in ("sinusoidal", "rope", "alibi", "t5:max_distance=32")
                ),
            ),
        ),
        source="Kazemnejad et al. 2023, The Impact of Positional Encoding on Length Generalization in Transformers",
        link="https://arxiv.org/abs/2305.19466",
        protocol="There: ten tasks, 107 million parameters, 12 layers, 40,000 steps, lengths to 20, tested to 40. "
        "Mean reciprocal rank is 0.69 without an encoding, 0.55 T5, 0.50 ALiBi, 0.33 RoPE, 0.22 sinusoids. Here: one "
        f"task (copying), 2 layers of width 64, 6,000 steps, words of up to 6 letters, judged at {LONGER}: whole words right. "
        "Of words of 6 letters NoPE has 84% right, the others 98% and more.",
    )
)
register(
    Claim(
        name="randomized-positions",
        title="Randomized positions on longer inputs",
        number="9c",
        clauses=(
            Clause(
                "Positions in training that are a random subset of a longer range help sinusoids, RoPE and ALiBi to copy "
                "longer words.",
                a=tuple(
                    more_accurate(randomized(label, LONGER), copy(label, LONGER))
                    for label in ("sinusoidal", "rope", "alibi")
                ),
            ),
        ),
        source="Ruoss et al. 2023, Randomized Positional Encodings Boost Length Generalization of Transformers",
        link="https://arxiv.org/abs/2305.16843",
        protocol="There: 15 tasks, encoders, lengths to 40 with positions to 2,048, tested to 500; 12 points more "
        "on average. Here: copying by a decoder, 6,000 steps, words of up to 6 letters with positions to 64, judged at "
        f"{LONGER}: whole words right. Of words of 6 letters sinusoids, RoPE and ALiBi have 1%, 42% and 40% with randomized "
        "positions, and 98% and more without. Varied: the T5 bias, which learns them with 92%.",
        costs="6,000 steps do not teach the trained words, so it cannot be judged here. How many would is not known.",
        varied=(more_accurate(*(study("t5:max_distance=32", LONGER) for study in (randomized, copy))),),
    )
)
register(
    Claim(
        name="path-flip-flop",
        title="PaTH and RoPE on flip-flop",
        number="10a",
        clauses=(
            Clause(
                "Within 800 steps one layer with PaTH solves flip-flop, also with many or few instructions that count;",
                a=tuple(
                    accuracy_above(flip_flop("path", 40, method), SOLVED) for method in ("forward", "sparse", "dense")
                ),
            ),
            Clause("one with RoPE does not;", a=(accuracy_below(flip_flop("rope", 40, "forward"), SOLVED),)),
            Clause(
                "with few of them, PaTH is right more often than RoPE and FoX.",
                a=tuple(
                    more_accurate(flip_flop("path", 40, "sparse"), flip_flop(other, 40, "sparse"))
                    for other in ("rope", "fox")
                ),
            ),
        ),
        source="Yang et al. 2025, PaTH Attention",
        link="https://arxiv.org/abs/2505.16381",
        protocol="There: one layer, 512 symbols; errors with the instructions of training, and if 98% of them must be ignored: "
        "RoPE 6.9 and 40.3%, FoX 8.3 and 36.3%, PaTH 0 and 0.0001%. Here: windows of 40 symbols, 800 steps, width 64; solved "
        f"from {SOLVED:.0%} of the bits on. Varied: windows of 128 symbols.",
        varied=(
            *(accuracy_below(flip_flop(other, 40, "dense"), SOLVED) for other in ("rope", "fox")),
            *(accuracy_above(flip_flop_long("path", 128, method), SOLVED) for method in ("forward", "sparse", "dense")),
            *(accuracy_below(flip_flop_long(label, 128, "dense"), SOLVED) for label in ("rope", "fox")),
        ),
    )
)
register(
    Claim(
        name="path-parity",
        title="PaTH and RoPE on parity",
        number="10b",
        clauses=(
            Clause(
                "After 1,000 steps at one rate, one layer with PaTH tracks parity,",
                a=(accuracy_above(parity("path", 40), SOLVED),),
            ),
            Clause(
                "and one or two layers with RoPE do not.",
                a=tuple(accuracy_below(study("rope", 40), SOLVED) for study in (parity, parity_of_two)),
            ),
        ),
        source="Yang et al. 2025, PaTH Attention",
        link="https://arxiv.org/abs/2505.16381",
        protocol="There: the word problem of the group A5, by the number of layers that solve it. Here: that of the "
        "group of two elements, parity, which is no stand-in for A5: it is solvable, and A5 is complete for NC1. 40 bits, 1,000 "
        "steps, width 64, one rate. No depth was found at which RoPE succeeds, so nothing is said of fewer layers.",
    )
)
register(
    Claim(
        name="attention-recalls",
        title="Recall of attention and of recurrences",
        number="11a",
        clauses=(
            Clause("Attention with RoPE recalls exactly", a=(accuracy_above(recall("rope", 256), SOLVED),)),
            Clause(
                "what Mamba-2, RWKV-6 and RetNet of the same width forget.",
                a=tuple(more_accurate(recall("rope", 256), recall(other, 256)) for other in RECURRENCES),
            ),
        ),
        source="Arora et al. 2024, Zoology: Measuring and Improving Recall in Efficient Language Models, figure 2",
        link="https://arxiv.org/abs/2312.04927",
        protocol="There: 2 layers (the configuration of figure 2), lengths to 512, up to 64 pairs of 8,192 symbols, rates swept. "
        "Here: width 64, 16 pairs in windows of 256, 24,000 examples, the best of four rates. RoPE and RetNet learned nothing at "
        "any of them; RWKV-6 has 98%, Mamba-2 99% in two seeds of three. Varied: 4 pairs in windows of 64, one rate.",
        varied=(accuracy_above(Measured("recall", "rope", 64), SOLVED),),
    )
)
register(
    Claim(
        name="recurrences-constant",
        title="Time per token of recurrences",
        number="11b",
        clauses=(
            Clause(
                "A recurrence takes the same time for every token however many came before,",
                b=tuple(token_time(label, below=CONSTANT) for label in ("mamba", "rwkv4", *RECURRENCES)),
            ),
            Clause(
                "and at a long context less than attention.",
                b=tuple(
                    time_below(
                        "decode", {"label": label, "context": 32768}, {"label": "rope+attention", "context": 32768}
                    )
                    for label in ("mamba", "rwkv4", *RECURRENCES)
                ),
            ),
        ),
        source="Gu and Dao 2023, Mamba; Sun et al. 2023, RetNet; Peng et al. 2023, RWKV",
        link="https://arxiv.org/abs/2312.00752",
        protocol="There: on GPUs, 1.4 to 7 billion parameters. Here: a decoding step of 4 layers of width 256 on "
        f"two cores, from the committed bench; constant is less than {CONSTANT:g} times at 32 times the context length.",
    )
)
for name, number, title, label, what, source, link, there in (
    (
        "abacus",
        "18a",
        "Abacus positions in addition",
        "abacus:max_start=16+fire",
        "Abacus positions, beside FIRE,",
        "McLeish et al. 2024, Transformers Can Do Arithmetic with the Right Embeddings",
        "https://arxiv.org/abs/2405.17399",
        "16 layers, 20 million examples of up to 20 digits, tested to 100 digits and more.",
    ),
    (
        "position-coupling",
        "18b",
        "Position coupling in addition",
        "coupled:max_start=16",
        "coupled positions",
        "Cho et al. 2024, Position Coupling",
        "https://arxiv.org/abs/2405.20671",
        "one layer, numbers of up to 30 digits, tested to 200.",
    ),
):
    register(
        Claim(
            name=name,
            title=title,
            number=number,
            clauses=(
                Clause(f"With {what} a model solves additions,", a=(accuracy_above(addition(label, 5), SOLVED),)),
                Clause("and those of twice the digits, too.", a=(accuracy_above(addition(label, TWICE), SOLVED),)),
            ),
            source=source,
            link=link,
            protocol=f"There: {there} Here: 2 layers of width 64, 320,000 examples of up to 5 digits, written from "
            f"the least digit on, judged at {TWICE}: whole sums right; solved from {SOLVED:.0%} on. FIRE alone and NoPE do not "
            "learn 5 digits here, so a gain over them is not judged.",
        )
    )  # fmt: skip
