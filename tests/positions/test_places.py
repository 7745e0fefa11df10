"""Places of digits, Abacus and position coupling: the rules, one pass against calls, and what is refused."""

import random as drawing
from copy import deepcopy

import pytest
import torch

import longitude as lg
from longitude.testing.examples import example
from tests.support import close, refused_calls

NAMES = ("abacus", "coupled")
PLUS, EQUALS, END = 10, 11, 12


def places(name: str, ids: list[int], **options) -> list[int]:
    return lg.encoding(name, max_length=9, dim=4, **options).places(torch.tensor([ids]))[0].tolist()


# ---- the rules -------------------------------------------------------------------------------------------------------
def test_abacus_is_what_the_authors_code_gives() -> None:
    """abacus.py of github.com/mcleish7/arithmetic at 55af9d5, its digits 0 .. 9, in evaluation."""
    ids = [3, 5, 1, PLUS, 7, 0, 2, EQUALS, 0, 6, 3, 0, END, 4]
    assert places("abacus", ids) == [1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1]
    assert places("abacus", [PLUS, PLUS, 4, 4]) == [0, 0, 1, 2]


def test_coupled_is_what_the_authors_code_gives_mirrored() -> None:
    """AdditionDatasetWithCoupledPositions of github.com/HanseulJo/position-coupling at 01dd272, padding, reverse_output, start 1:

    653+049= has 2 3 4 5 2 3 4 5, and its answer, from the least digit on, 4 3 2 1. Where operands are written so, too, places
    count up from + and =: 5 becomes 1, 4 becomes 2.
    """
    first, plus, second, equals, answer = [2, 3, 4], [5], [2, 3, 4], [5], [4, 3, 2, 1]
    want = [6 - place for part in (first[::-1], plus, second[::-1], equals, answer) for place in part]
    assert places("coupled", [3, 5, 6, PLUS, 9, 4, 0, EQUALS, 2, 0, 7, 0, END]) == [*want, 0]


def by_hand(name: str, ids: list[int], documents: list[int]) -> list[int]:
    """The rule in words, one token after the other."""
    made: list[int] = []
    for n, token in enumerate(ids):
        same = n > 0 and documents[n] == documents[n - 1]
        if documents[n] < 0:
            made.append(0)
        elif token < 10:
            first = 1 if name == "abacus" else 2
            made.append(made[-1] + 1 if same and ids[n - 1] < 10 else first)
        else:
            made.append(int(name == "coupled" and token in (PLUS, EQUALS)))
    return made


@pytest.mark.parametrize("name", NAMES)
def test_random_tokens_in_documents_and_padding_follow_the_rule(name: str) -> None:
    draw, encoding = drawing.Random(0), lg.encoding(name, max_length=99, dim=4)
    for _ in range(50):
        ids = [draw.randrange(14) if draw.random() < 0.5 else draw.randrange(10) for _ in range(30)]
        documents = sorted(draw.choice([-1, 0, 1, 2]) for _ in range(30))
        got = encoding.places(torch.tensor([ids]), torch.tensor([documents]))
        assert got[0].tolist() == by_hand(name, ids, documents)
        assert encoding.places(torch.tensor([ids]))[0].tolist() == by_hand(name, ids, [0] * 30)
        assert torch.equal(encoding.places(torch.tensor([ids[:17]])), encoding.places(torch.tensor([ids]))[:, :17])


@pytest.mark.parametrize("name", NAMES)
def test_a_place_selects_a_row(name: str) -> None:
    encoding, x = example(name)(), torch.randn(2, 5, 16, dtype=torch.float64)
    at = torch.tensor([[0, 3, 1, 700, 0], [5, 5, 5, 2, 1]])
    close(encoding.embed(x, at), x + encoding.table[at])
    assert len(encoding.table) == encoding.max_length == 1 + 600 + 100


# ---- random starts ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_random_starts_move_all_places_of_a_row_and_no_others(name: str) -> None:
    encoding = lg.encoding(name, max_length=9, dim=4, max_start=3)
    ids = torch.tensor([[1, 2, PLUS, 3, 4, EQUALS, 4, 6, 0, END]]).expand(200, -1)
    still, found = encoding.places(ids), set()
    torch.manual_seed(0)
    moved = encoding.places(ids, random_start=True)
    torch.manual_seed(0)
    assert torch.equal(moved, encoding.places(ids, random_start=True))
    for row in moved - still:
        (start,) = set(row[still[0] > 0].tolist())
        assert not row[still[0] == 0].any()
        found.add(start)
    assert found == {0, 1, 2} and int(moved.max()) < encoding.max_length


# ---- in models -------------------------------------------------------------------------------------------------------
def model_with(*specs: str | dict, mixers: list | None = None, **options) -> lg.LongitudeForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 29, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    config = lg.LongitudeConfig(**sizes, encoding=list(specs), mixers=mixers, **options)
    return lg.LongitudeForCausalLM(config).double().eval()


IDS = torch.tensor(
    [[1, 2, 3, PLUS, 4, 5, 6, EQUALS, 5, 7, 9, 0, END], [13, 13, 1, PLUS, 9, EQUALS, 0, 1, END, 2, 2, 2, 2]]
)


@torch.no_grad()
def test_positions_of_others_stay() -> None:
    """abacus+rope: rope rotates by the order of tokens, and abacus adds what embed adds."""
    model = model_with("rope", "abacus")
    abacus, got = model.model.encodings[1], model(IDS).logits
    embeds = abacus.embed(model.model.embed_tokens(IDS) * 4, abacus.places(IDS)) / 4
    plain = model_with("rope")
    plain.load_state_dict(model.state_dict(), strict=False)
    close(got, plain(inputs_embeds=embeds).logits)


@pytest.mark.parametrize("name", NAMES)
def test_training_draws_and_evaluation_does_not(name: str) -> None:
    model = model_with(name)
    state = torch.get_rng_state()
    assert torch.equal(model(IDS).logits, model(IDS).logits) and torch.equal(state, torch.get_rng_state())
    model.train()
    torch.manual_seed(1)
    first, second = model(IDS).logits, model(IDS).logits
    torch.manual_seed(1)
    assert torch.equal(first, model(IDS).logits) and not torch.allclose(first, second)
    assert torch.equal(model(IDS, use_cache=True).logits, model(IDS, use_cache=True).logits)  # later calls continue it


def test_encoders_and_encoder_decoders_have_places() -> None:
    torch.manual_seed(0)
    config = lg.LongitudeConfig(vocab_size=29, hidden_size=16, num_hidden_layers=1, encoding="abacus", bos_token_id=0)
    alone, both = lg.LongitudeForMaskedLM(config).eval(), lg.LongitudeForSeq2SeqLM(deepcopy(config)).eval()
    target, table = IDS[:, :5], both.encoder.embed_tokens
    for stack, embeddings, ids in (
        (alone.model, alone.model.embed_tokens, IDS),
        (both.encoder, table, IDS),
        (both.decoder, table, target),
    ):
        embedded = []
        hook = stack.layers[0].register_forward_pre_hook(lambda _, args: embedded.append(args[0]))  # noqa: B023
        alone(IDS)
        both(input_ids=IDS, decoder_input_ids=target)
        hook.remove()
        close(embedded[0], stack.encodings[0].embed(embeddings(ids) * 4, stack.encodings[0].places(ids)))


MODEL = model_with("abacus")
A, X = {"max_length": 9, "dim": 4}, torch.zeros(1, 2, 4)
test_refusals = refused_calls([
    (lambda: lg.Abacus(**A, digits=()), "digits", "Abacus", "0"),
    (lambda: lg.Coupled(**A, separators=["+"]), "separators", "Coupled"),
    (lambda: lg.Coupled(**A, separators=[9, 10]), "Coupled", "[9]"),
    (lambda: lg.Abacus(**A).embed(X, torch.tensor([9, 110])), "places", "0", "109", "9"),
    (lambda: MODEL(inputs_embeds=MODEL.model.embed_tokens(IDS)), "ids", "input_ids"),
])  # fmt: skip
