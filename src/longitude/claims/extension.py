"""Claims about models that are read past their training length through a scheme, without training and after a short one."""

from functools import partial

from longitude.claims.base import Claim, register
from longitude.claims.evidence import Measured
from longitude.claims.statements import loss_below, loss_within

extension = partial(Measured, "extension")
LENGTHS = (256, 512, 1024)
"""2, 4 and 8 times the training length."""
HERE = "Here: bytes of Python, models of 0.4 million parameters trained at 128, windows that do not overlap."

register(
    Claim(
        name="tables-interpolated",
        number="1c",
        claimed="A table of positions interpolated to a longer text reads it better than the text cropped to the trained length.",
        source="A chapter of a book on relative positions, of the original Transformer; Dosovitskiy et al. 2021 "
        "interpolate a table for larger images, before training on",
        link="https://arxiv.org/abs/2010.11929",
        protocol=f"There: no measurement without training. {HERE} Cropped: the same bytes in windows of 128.",
        statements=tuple(
            loss_below(extension(label, length, "linear"), extension(label, 128))
            for label in ("sinusoidal", "learned")
            for length in (256, 512)
        ),
    )
)
register(
    Claim(
        name="schemes-in-order",
        number="4a",
        claimed="Without training, NTK-aware scaling reads longer text better than position interpolation, and YaRN "
        "better than both.",
        source="bloc97 2023, NTK-Aware Scaled RoPE; Peng et al. 2024, YaRN, section B.3",
        link="https://arxiv.org/abs/2309.00071",
        protocol=f"There: LLaMA and Llama 2 of 7 billion parameters, trained at 2,048 and 4,096, sliding windows. {HERE}",
        statements=tuple(
            loss_below(extension("rope", length, better), extension("rope", length, worse))
            for length in LENGTHS
            for better, worse in (("ntk", "linear"), ("yarn", "ntk"))
        ),
    )
)
register(
    Claim(
        name="searched-factors",
        number="4b",
        claimed="Factors that were searched beat YaRN without training.",
        source="Ding et al. 2024, LongRoPE, sections 2 and 3",
        link="https://arxiv.org/abs/2402.13753",
        protocol="There: Llama 2 of 7 billion parameters, trained at 4,096; an evolutionary search on five "
        f"documents, at the length that is tested. {HERE} Searched at each length on the selection text, which is "
        "not measured.",
        statements=tuple(
            loss_below(extension("rope", length, "longrope"), extension("rope", length, "yarn")) for length in LENGTHS
        ),
    )
)
register(
    Claim(
        name="yarn-crops",
        number="4c",
        claimed="Without training, YaRN is about as good as cropping the text to the trained length.",
        source="Gelberg et al. 2025, Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings, figure 5",
        link="https://arxiv.org/abs/2512.12167",
        protocol=f"There: perplexity and retrieval match, models of 0.4 billion parameters and more. {HERE} The loss "
        "within 2 % of that of the same bytes in windows of 128.",
        statements=tuple(loss_within(extension("rope", length, "yarn"), extension("rope", 128)) for length in LENGTHS),
    )
)
