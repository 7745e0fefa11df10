"""Tasks over lists of generated records, without running text: pairs, words, a conversation, edges, labelled lines.

Their questions are after Liu et al. 2024, "Lost in the Middle" (key-value); Jelassi et al. 2024, "Repeat After Me" (copy);
OpenAI's MRCR and GraphWalks; and Bertsch et al. 2025, "Oolong". docs/measuring.md lists where ours differ and what chance scores.
"""

import re
from collections.abc import Callable, Sequence
from random import Random
from uuid import UUID

from longitude.measure.retrieval.haystack import Haystack, depths_of, word_list
from longitude.measure.retrieval.prompts import Question


def list_f1(output: str, answers: Sequence[str]) -> float:
    """F1 of the nodes in the first list of the output against those of the answer, as sets (GraphWalks); 0 without a list."""
    listed, closed, _ = output.partition("]")
    nodes = {*re.findall(r"\b[0-9a-f]{10}\b", listed.rpartition("[")[2])} if closed else set()
    return 2 * len(nodes & {*answers}) / (len(nodes) + len(answers))


def first_word(output: str, answers: Sequence[str]) -> float:
    """1 if the answer is the first word of the output, or that after "Label:" or "The most common label is"."""
    word = re.match(r"\W*(?:(?:the\b[^.\n]*?\b)?label\b(?:\s+is\b)?\W*)?([a-z]+)", output.lower())
    return float(word is not None and word[1] == answers[0])


def among(
    size: int, line: Callable[[Random], str], order: float, needles: Sequence[str], depths: list[float]
) -> list[str]:
    """`size` lines, the same for the same `order`, and needle i after about the part depths[i] (ascending) of them."""
    random = Random(order)
    lines = [line(random) for _ in range(size)]
    for depth, needle in reversed(list(zip(depths, needles, strict=True))):
        lines.insert(round(depth * size), needle)
    return lines


# ---- keys and values -------------------------------------------------------------------------------------------------
PAIRS = (
    'Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{{{pairs}}}\n\n'
    'Key: "{key}"\nCorresponding value:'
)  # fmt: skip


def key_value(random: Random, length: int, depth: float | None, haystack: Haystack) -> Question:
    """The value of a key among `size` other pairs of UUIDs, as published."""
    key, value, order = _uuid(random), _uuid(random), random.random()
    depths, needle = depths_of(random, 1, depth), f'"{key}": "{value}"'

    def text(size: int) -> str:
        pairs = among(size, lambda random: f'"{_uuid(random)}": "{_uuid(random)}"', order, [needle], depths)
        return PAIRS.format(pairs=",\n ".join(pairs), key=key)

    ask = text(0).partition("}\n\n")[2]
    begin = ask.partition("\n")[2]
    return Question(text=text, ask=ask, begin=begin, needles=(needle,), answers=(value,), whole_answer=f' "{value}"')


def _uuid(random: Random) -> str:
    return str(UUID(int=random.getrandbits(128), version=4))


# ---- words to be copied ----------------------------------------------------------------------------------------------
VOCABULARY = 64
"""Different words of a sequence: few, so that each occurs often and only several in a row tell a place."""
GRAM = 4
"""Words that are asked for, and as many that follow."""
SEQUENCE = (
    'Memorize the sequence of words below.\n{words}\nWhich {count} words come right after "{gram}" in the sequence?'
)


def copy(random: Random, length: int, depth: float | None, haystack: Haystack) -> Question:
    """The four words after four that stand once in a sequence of few different words; units of filler: words."""
    words = random.sample(word_list(), VOCABULARY)
    chosen, order = random.sample(words, 2 * GRAM), random.random()
    [depth] = depths_of(random, 1, depth)
    gram, answer = chosen[:GRAM], " ".join(chosen[GRAM:])

    def text(size: int) -> str:
        drawn, sequence = Random(order), list[str]()
        for i in range(size + 1):
            if i == round(depth * size):
                sequence += chosen
            if i < size:
                again = sequence[1 - GRAM :] == gram[:-1]  # the words asked for shall stand once
                sequence.append(drawn.choice([word for word in words if word != gram[-1]] if again else words))
        return SEQUENCE.format(words=" ".join(sequence), count=GRAM, gram=" ".join(gram)) + " " + begin

    begin = f'The words after "{" ".join(gram)}" are:'
    ask = text(0).rpartition("\n")[2]
    return Question(text=text, ask=ask, begin=begin, needles=(" ".join(chosen),), answers=(answer,))


# ---- the same request several times ----------------------------------------------------------------------------------
KINDS = ("phone number", "locker number", "ticket number", "serial number")
TOPICS = 4
ORDINALS = ("first", "second", "third", "fourth")
TURN = "User: Give me a {kind} for the {topic}.\nAssistant: {number}"
CONVERSATION = (
    "Below is a conversation between a user and an assistant. Some requests are made several times, and each has its own answer."
    "\n{turns}\nReturn the {ordinal} {kind} for the {topic}. The {ordinal} {kind} for the {topic} is"
)


def nth_request(random: Random, length: int, depth: float | None, haystack: Haystack) -> Question:
    """The answer to one of four identical requests in a conversation of `size` others, which share its kind or its topic."""
    topics = random.sample(word_list(), TOPICS)
    requests = [(kind, topic) for kind in KINDS for topic in topics]
    kind, topic = asked = random.choice(requests)
    numbers = [str(number) for number in random.sample(range(10**6, 10**7), len(ORDINALS))]
    turns = tuple(TURN.format(kind=kind, topic=topic, number=number) for number in numbers)
    which, order, depths = random.randrange(len(ORDINALS)), random.random(), depths_of(random, len(turns))

    def turn(random: Random) -> str:
        kind, topic = random.choice([request for request in requests if request != asked])
        return TURN.format(kind=kind, topic=topic, number=random.randint(10**6, 10**7 - 1))

    def text(size: int) -> str:
        lines = "\n".join(among(size, turn, order, turns, depths))
        return CONVERSATION.format(turns=lines, ordinal=ORDINALS[which], kind=kind, topic=topic)

    ask = text(0).rpartition("\n")[2]
    return Question(text=text, ask=ask, begin=ask[ask.index("The ") :], needles=turns, answers=(numbers[which],))


# ---- a graph as a list of edges ----------------------------------------------------------------------------------------
FEWEST, MOST = 2, 5
"""Nodes of an answer."""
TOKENS_A_NODE = 50
"""Tokens of the length for one node of the graph: then two or three edges begin at each."""
GRAPH = (
    "Below is a directed graph as a list of edges, one a line. Apply the operation after it, and list the nodes that it gives. "
    "A breadth-first search (BFS) gives the nodes at exactly that depth: not the node that it starts from, and none that it has "
    "visited before. The parents of a node are the nodes with an edge to it.\n\n"
    "For the edges\nabcd -> uvwx\nabcd -> efgh\nefgh -> uvwx\nuvwx -> alke\n"
    "Operation: Find the parents of node uvwx.\nFinal Answer: [abcd, efgh]\n"
    "Operation: Perform a BFS from node abcd with depth 2.\nFinal Answer: [alke]\n\n"
    "The edges of the graph:\n{edges}\n\nOperation: {operation}\nFinal Answer: ["
)


def parents(random: Random, length: int, depth: float | None, haystack: Haystack) -> Question:
    """All nodes with an edge to a node, among `size` edges that lead elsewhere."""
    node, *answers = names = _nodes(random, 1 + random.randint(FEWEST, MOST))
    edges = [(parent, node) for parent in answers]
    operation = f"Find the parents of node {node}."
    return _graph(random, length, operation, edges, answers, sources=names, targets=answers)


def search(random: Random, length: int, depth: float | None, haystack: Haystack) -> Question:
    """All nodes two edges from a node, among `size` edges from other nodes; edges back to nearer nodes, too."""
    count = random.randint(FEWEST, MOST)
    node, first, second, *answers = _nodes(random, 3 + count)
    edges = [(node, first), (node, second), (first, second), (second, node)]
    edges += [(random.choice((first, second)), answer) for answer in answers]
    operation = f"Perform a BFS from node {node} with depth 2."
    return _graph(random, length, operation, edges, answers, sources=answers, targets=[node, first, second, *answers])


def _nodes(random: Random, count: int) -> list[str]:
    return [f"{number:010x}" for number in random.sample(range(16**10), count)]


def _graph(
    random: Random,
    length: int,
    operation: str,
    edges: list[tuple[str, str]],
    answers: list[str],
    sources: list[str],
    targets: list[str],
) -> Question:
    """sources, targets: the named nodes at which other edges may start and end without changing the answer."""
    others = _nodes(random, max(MOST, length // TOKENS_A_NODE))
    needles = [f"{source} -> {target}" for source, target in edges]
    random.shuffle(needles)
    order, depths = random.random(), depths_of(random, len(needles))

    def edge(random: Random) -> str:
        return f"{random.choice(others + sources)} -> {random.choice(others + targets)}"

    def text(size: int) -> str:
        return GRAPH.format(edges="\n".join(among(size, edge, order, needles, depths)), operation=operation)

    ask = text(0).rpartition("\n\n")[2]
    begin = ask.partition("\n")[2]
    whole = ", ".join(answers) + "]"
    return Question(text=text, ask=ask, begin=begin, needles=tuple(needles), answers=tuple(answers), whole_answer=whole)


# ---- labels to be counted ----------------------------------------------------------------------------------------------
SHARES = (0.34, 0.26, 0.22, 0.18)
"""Part of the lines with each label; the first is the most common."""
CERTAIN = 13
"""Lines from which the most common label is ahead of the next by one at least."""
TOKENS_A_COUNT = 100
"""Tokens of the length for one line that is counted, at most."""
RECORD = "Label: {label} || User: {user}"
RECORDS = "Each of the following lines has one of the labels {labels}, and a user.\n{lines}\n"
COUNT = "In the above data, how many lines have the label {label}? Only answer with the number. Answer:"
MOST_COMMON = "In the above data, which label is the most common? Only answer with the label. Label:"


def label_count(random: Random, length: int, depth: float | None, haystack: Haystack) -> Question:
    """How many lines have a label, among `size` lines with three other labels."""
    labels = random.sample(word_list(), len(SHARES))
    users = random.sample(range(10**4, 10**5), max(4, length // TOKENS_A_COUNT))
    label, users = random.choice(labels), users[: random.randint(2, len(users))]
    needles = tuple(RECORD.format(user=user, label=label) for user in users)
    order, depths, ask = random.random(), depths_of(random, len(needles)), COUNT.format(label=label)

    def line(random: Random) -> str:
        return _record(random, random.choice([other for other in labels if other != label]))

    def text(size: int) -> str:
        lines = among(size, line, order, needles, depths)
        return RECORDS.format(labels=", ".join(labels), lines="\n".join(lines)) + ask

    return Question(text=text, ask=ask, begin="Answer:", needles=needles, answers=(str(len(needles)),))


def most_common_label(random: Random, length: int, depth: float | None, haystack: Haystack) -> Question:
    """The most common of four labels in `size` lines."""
    labels, order = random.sample(word_list(), len(SHARES)), random.random()
    listed = ", ".join(random.sample(labels, len(labels)))

    def text(size: int) -> str:
        shuffled = Random(order)
        lines = [
            _record(shuffled, label)
            for label, part in zip(labels, SHARES, strict=True)
            for _ in range(int(part * size))
        ]
        shuffled.shuffle(lines)
        return RECORDS.format(labels=listed, lines="\n".join(lines)) + MOST_COMMON

    return Question(text=text, smallest=CERTAIN, ask=MOST_COMMON, begin="Label:", answers=(labels[0],))


def _record(random: Random, label: str) -> str:
    return RECORD.format(user=random.randint(10**4, 10**5 - 1), label=label)
