"""Claims about text longer than that of training."""

from longitude.claims.base import Claim, register
from longitude.claims.evidence import Measured
from longitude.claims.statements import holds


def text(label: str, length: int, method: str | None = None) -> Measured:
    """Of the study `text`, trained on 128 bytes."""
    return Measured("text", label, length, method)


register(
    Claim(
        name="alibi-holds",
        number=2,
        claimed="ALiBi holds its perplexity on texts of up to 16 times its training length.",
        source="Press, Smith and Lewis 2022, Train Short, Test Long",
        link="https://arxiv.org/abs/2108.12409",
        protocol="Trained on 128 bytes, measured on windows of up to 2048.",
        statements=tuple(holds(text("alibi", length), at=128) for length in (256, 512, 1024, 2048)),
    )
)
