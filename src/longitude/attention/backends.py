"""The ways to compute one operation: what each declares, and the one function that says why a backend refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longitude.attention import toeplitz
from longitude.attention.reference import added, per_query_head, reference
from longitude.attention.request import Request
from longitude.attention.spans import by_spans, pieces, spans, steady
from longitude.attention.transport import transport_attention, transported_scores
from longitude.positions.base import Drift, OffsetBias, OffsetVectors, PairBias, RowBias, Transport

ALL_TERMS = (OffsetBias, PairBias, Drift, OffsetVectors, RowBias, Transport)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Backend:
    """What a backend can do. `refuses` reads the declarations; `limits` adds what they cannot say."""

    name: str
    run: Callable[[Request], Tensor]
    terms: tuple[type, ...]
    any_mask: bool  # else: causality, windows, and padding and documents in spans
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[str, ...] | None  # None: all
    table_gradients: bool
    dropout: bool
    weights: bool
    limits: Callable[[Request], str | None]
    memory: Callable[[Request], int]  # bytes beyond inputs and output, forward
    price: Callable[[Request], float]  # rough time over plain causal attention, to choose by


def refuses(backend: Backend, r: Request) -> str | None:
    """Why this backend does not take this request, in words; None if it does."""
    for term in r.terms:
        if not isinstance(term, backend.terms):
            return f"it does not know {type(term).__name__}"
    if r.q.dtype not in backend.dtypes:
        return f"it computes in {_names(backend.dtypes)}, not in {r.q.dtype}"
    if backend.devices is not None and r.q.device.type not in backend.devices:
        return f"it runs on {', '.join(backend.devices)}, not on {r.q.device.type}"
    if r.learned and not backend.table_gradients:
        return "it gives no gradient to what the encoding has learned"
    if r.dropout and not backend.dropout:
        return "it has no dropout"
    if r.weights and not backend.weights:
        return "it never holds the weights"
    if r.beyond_band and not backend.any_mask and isinstance(why := spans(r), str):
        return f"it runs span by span, and {why}"
    return backend.limits(r)


# ---- reference -------------------------------------------------------------------------------------------------------
PAIR_NUMBERS = 64  # what a learned function of two positions holds per pair: a layer of 32, before and after its ReLU


def dense_bytes(r: Request) -> int:
    """Scores, bias, weights, mask: four [B, H, Lq, Lk] at once; and what the terms hold on the way to their bias."""
    return 4 * r.q.shape[0] * r.heads * r.rows * r.length * _wide_item(r) + terms_bytes(r)


def terms_bytes(r: Request) -> int:
    """What the hungriest term holds while it makes its bias, beyond some [B, H, Lq, Lk]."""
    pairs = r.rows * r.length * (1 if r.contiguous else r.q.shape[0])
    numbers = 0
    for term in r.terms:
        match term:
            case PairBias():
                numbers = max(numbers, PAIR_NUMBERS * pairs)
            case OffsetVectors():  # a column per offset, before it moves to its key; or a vector per pair and head
                columns = 2 * r.q.shape[0] * r.heads * r.rows * (r.rows + r.length)
                numbers = max(numbers, columns if r.contiguous else r.heads * r.q.shape[3] * pairs)
            case RowBias():  # gates, their sum, two neighbours of a table, as numbers and as indices
                numbers = max(numbers, 5 * r.q.shape[0] * r.heads * r.rows * r.length)
    return numbers * _wide_item(r)


def _wide_item(r: Request) -> int:
    """Bytes of a number in float32 or wider."""
    return torch.promote_types(r.q.dtype, torch.float32).itemsize


REFERENCE = Backend(
    "reference",
    run=lambda r: reference(r)[0],
    terms=ALL_TERMS,
    any_mask=True,
    dtypes=FLOATS,
    devices=None,
    table_gradients=True,
    dropout=True,
    weights=True,
    limits=lambda r: None,
    memory=dense_bytes,
    price=lambda r: 6.0 if dense_bytes(r) <= 2**28 else math.inf,
)


# ---- chunked: the reference over blocks of queries, forgotten after each block and made again in backward ------------
BLOCK_BYTES = 2**25


def block_rows(r: Request) -> int:
    return max(1, min(r.rows, BLOCK_BYTES // max(1, dense_bytes(r) // r.rows)))


def chunked(r: Request) -> Tensor:
    """Query blocks against the keys in their reach. Memory stays at a few blocks of [rows, Lk], in backward too."""
    rows = block_rows(r)
    outs = []
    for start in range(0, r.rows, rows):
        stop = min(start + rows, r.rows)
        block = r.piece(slice(start, stop), r.reachable(start, stop))
        if torch.is_grad_enabled():
            outs.append(checkpoint(lambda b=block: reference(b, by_chunks)[0], use_reentrant=False))
        else:
            outs.append(reference(block, by_chunks)[0])
    return torch.cat(outs, 2)


def by_chunks(terms: list[Transport], q: Tensor, k: Tensor, r: Request) -> Tensor:
    """The scores of a transport, its tokens a chunk at a time; zero for keys after the query."""
    scores = transported_scores(q, *transport_window(terms[0], k, r), terms[0].chunk)
    return F.pad(scores, (0, r.length - scores.shape[3]))  # crops, too, where queries outlast the keys


def transport_window(term: Transport, k: Tensor, r: Request) -> tuple[Tensor, Tensor, Tensor]:
    """Keys up to the last query, and w and b of those of their tokens that they are not carried past.

    Where queries outlast the keys that they may see, as beside padding, zeros stand for the keys between."""
    tokens = slice(max(0, r.k_order - term.first), r.q_order + r.rows - term.first)
    w, b = (per_query_head(x[:, :, tokens], r.heads) for x in (term.w, term.b))
    return F.pad(k, (0, 0, 0, r.order_gap + r.rows - r.length)), w, b


CHUNKED = Backend(
    "chunked",
    run=chunked,
    terms=ALL_TERMS,
    any_mask=True,
    dtypes=FLOATS,
    devices=None,
    table_gradients=True,
    dropout=True,
    weights=False,
    limits=lambda r: None,
    memory=lambda r: dense_bytes(r) * block_rows(r) // r.rows,
    price=lambda r: 8.0,
)


# ---- sdpa: torch's fused attention where it applies as it is, or with a short dense bias -----------------------------
SHORT_BYTES = 2**26


def sdpa_is_plain(r: Request) -> bool:
    """Nothing but causality that torch's own flag states (a query sees keys up to its own index), or no mask."""
    low, high = r.band
    all_seen = (low is None or r.order_gap - low >= r.length - 1) and high is None
    return len(r.terms) == len(r.beyond_band) == 0 and (all_seen or ((low, high) == (0, None) and r.order_gap == 0))


def sdpa(r: Request) -> Tensor:
    def run(r: Request) -> Tensor:
        grouped = r.k.shape[1] != r.heads
        if sdpa_is_plain(r):
            causal = r.band == (0, None) and r.order_gap == 0
            return F.scaled_dot_product_attention(
                r.q,
                r.k,
                r.v,
                dropout_p=r.dropout,
                is_causal=True if causal else False,  # noqa: SIM210 (a compiler's symbolic bool is no bool)
                scale=r.scale,
                enable_gqa=grouped,
            )
        allowed = r.allowed()
        some = allowed.any(-1, keepdim=True)  # a query with nothing to look at looks at all, and is then set to zero
        bias = torch.zeros_like(allowed, dtype=r.q.dtype).masked_fill(~(allowed | ~some), -math.inf)
        for term in r.terms:
            bias = bias + added(term, r.q, r.q, allowed, r).to(r.q.dtype)
        out = F.scaled_dot_product_attention(
            r.q, r.k, r.v, attn_mask=bias, dropout_p=r.dropout, scale=r.scale, enable_gqa=grouped
        )
        return out.masked_fill(~some, 0.0)

    with torch.autocast(r.q.device.type, enabled=False):  # the dtype of q is the dtype of the answer, as everywhere
        return by_spans(r, run) if sdpa_by_spans(r) else run(r)


def sdpa_by_spans(r: Request) -> bool:
    """Whether padding and documents are cut away first. A dense row is no larger than the keys: decoding needs no spans."""
    return r.rows > 1 and len(r.beyond_band) > 0 and not isinstance(spans(r), str)


def sdpa_dense(r: Request) -> list[Request]:
    """The parts of it that need a dense bias."""
    cut = pieces(r) if sdpa_by_spans(r) else [(slice(None), slice(0, r.rows), r)]
    assert not isinstance(cut, str), cut
    return [piece for _, _, piece in cut if not sdpa_is_plain(piece)]


def sdpa_bias_bytes(r: Request) -> int:
    heads = r.heads if r.terms else 1
    per_row = r.beyond_band or not r.contiguous
    return (r.q.shape[0] if per_row else 1) * heads * r.rows * r.length * r.q.element_size()


def sdpa_memory(r: Request) -> int:
    """A term's bias is made in float64, offsets and product, before it is added up in the dtype of q."""
    times = 2 + 2 * 8 // r.q.element_size() if r.terms else 1
    return max([0, *(sdpa_bias_bytes(part) * times + terms_bytes(part) for part in sdpa_dense(r))])


def sdpa_limits(r: Request) -> str | None:
    for part in sdpa_dense(r):
        if r.terms and r.q.dtype in (torch.bfloat16, torch.float16):
            return f"its dense bias would be rounded to {r.q.dtype}"
        if (size := sdpa_bias_bytes(part)) > SHORT_BYTES:
            return f"its dense bias would take {size / 2**20:.0f} MiB, above {SHORT_BYTES // 2**20}"
    return None


SDPA = Backend(
    "sdpa",
    run=sdpa,
    terms=(OffsetBias, PairBias, Drift),
    any_mask=True,
    dtypes=FLOATS,
    devices=None,
    table_gradients=False,
    dropout=True,
    weights=False,
    limits=sdpa_limits,
    memory=sdpa_memory,
    price=lambda r: 1.0 if sdpa_is_plain(r) else 4.0,
)


# ---- table: every bias of the offset is one table of Lq + Lk - 1 numbers per head ------------------------------------
TABLE_KERNEL = toeplitz.available()  # probed here, about a millisecond, because a compiler may not look later


def table(r: Request) -> Tensor:
    def run(r: Request) -> Tensor:
        r = steady(r) or r
        assert isinstance(r.q_positions, int) and isinstance(r.k_positions, int)
        diagonal = torch.arange(r.rows + r.length - 1, device=r.q.device)
        offset = r.q_positions - r.k_positions + r.rows - 1 - diagonal
        bias = torch.zeros(r.heads, offset.shape[0], dtype=r.q.dtype, device=r.q.device)
        for term in r.terms:
            assert isinstance(term, OffsetBias)
            bias = bias + term.at(offset).to(r.q.dtype)
        # The kernel counts orders so that the last query meets the last key.
        late = r.order_gap + r.rows - r.length
        low, high = (None if bound is None else bound - late for bound in r.band)
        return toeplitz.toeplitz_attention(r.q, r.k, r.v, bias, low=low, high=high, scale=r.scale)

    return by_spans(r, run)


def table_limits(r: Request) -> str | None:
    if not TABLE_KERNEL:
        return "this build of torch lacks the fused CPU kernel it reads its table through"
    cut = pieces(r)
    assert not isinstance(cut, str), cut
    if any(steady(piece) is None for _, _, piece in cut):
        return "positions do not count up by one, as far as it may look; say one int p for p, p+1, p+2, ..."
    if r.v.shape[3] != r.k.shape[3]:
        return f"it needs values as wide as keys, not {r.v.shape[3]} and {r.k.shape[3]}"
    return None


TABLE = Backend(
    "table",
    run=table,
    terms=(OffsetBias,),
    any_mask=False,
    dtypes=(torch.float64, torch.float32),
    devices=("cpu",),
    table_gradients=True,
    dropout=False,
    weights=False,
    limits=table_limits,
    # the queries in reverse, and the table: its offsets, its bias, its band
    memory=lambda r: (r.q.numel() + 6 * r.heads * (r.rows + r.length)) * r.q.element_size(),
    price=lambda r: 2.0 if r.learned else 1.2,
)


# ---- transport: products of reflections between queries and keys, in memory linear in the length ----------------------
def transport(r: Request) -> Tensor:
    def run(r: Request) -> Tensor:
        (term,) = (term for term in r.terms if isinstance(term, Transport))
        k, v = (per_query_head(x, r.heads) for x in (r.k, r.v))
        hidden = max(0, r.order_gap + r.rows - r.length)
        k, w, b = transport_window(term, k, r)
        v = F.pad(v[:, :, : k.shape[2]], (0, 0, 0, hidden))
        level = None
        for drift in r.terms:
            if isinstance(drift, Drift):
                own = per_query_head(drift.level[:, :, r.k_order : r.k_order + k.shape[2]], r.heads)
                own = r.scale * own if drift.scaled else own
                level = own if level is None else level + own
        return transport_attention(r.q, k, v, w, b, r.scale, level, r.band[1], term.chunk, hidden)

    return by_spans(r, run)


def transport_limits(r: Request) -> str | None:
    if not any(isinstance(term, Transport) for term in r.terms):
        return "there is no transport to follow"
    if r.band[0] != 0:
        return "it follows plain order: it needs Causal() or Window(size)"
    return None


def transport_memory(r: Request) -> int:
    """Keys, w, b, their products and queries in wide copies; the scores of one chunk of queries, and their weights."""
    chunk = max((term.chunk for term in r.terms if isinstance(term, Transport)), default=1)
    per_token = 6 * r.q.shape[3] + 2 * chunk
    return r.q.shape[0] * r.heads * (r.length * per_token + 4 * min(chunk, r.rows) * r.length) * _wide_item(r)


TRANSPORT = Backend(
    "transport",
    run=transport,
    terms=(Transport, Drift),
    any_mask=False,
    dtypes=FLOATS,
    devices=None,
    table_gradients=True,
    dropout=False,
    weights=False,
    limits=transport_limits,
    memory=transport_memory,
    price=lambda r: 4.0,
)

BACKENDS = {backend.name: backend for backend in (SDPA, TABLE, TRANSPORT, CHUNKED, REFERENCE)}


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
