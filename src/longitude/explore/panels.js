"use strict";
// The panels: what each draws of the state.
const RELEVANT = { rope: ["dim", "base", "scheme"], alibi: ["heads", "head"], t5: ["reach"], kerple_log: ["a", "p"], kerple_power: ["a", "p"], sandwich: ["heads", "head"] };

function offsetsTo(end, points = 220) { // close together where they are small, whole, the ticks among them
  const spread = range(points).map((i) => Math.round((end + 1) ** (i / (points - 1)) - 1));
  return [...new Set([...spread, ...ticks(0, end, "offsets")])].sort((a, b) => a - b);
}

function comparedPanel(place) {
  const { compared, trained, factor } = state, end = Math.ceil(factor * trained);
  for (const name of new Set(Object.values(RELEVANT).flat())) only(place, name, compared.some((each) => RELEVANT[each].includes(name)));
  const x = offsetsTo(end - 1), all = CONTROLS.compared.several;
  const lines = compared.map((name) => ({ name, x, y: x.map(COMPARED[name](state)), colour: all.indexOf(name) }));
  draw(place.querySelector("figure"), {
    title: "Change of the score, by offset", x: "offset (query - key)", y: "change of the score", logX: true, lines, floor: -16, range: [-4, 0],
    shade: trained, marks: [{ words: `trained: ${number(trained)}`, at: trained }],
    caption: "The score of a key at each offset, less that of the query's own token, before softmax: at −2.3 a key weighs a tenth. Shaded: beyond the trained length. "
      + "rope for q = k, all dimensions alike; t5 with an example table, which holds −ln(1 + the first distance of a bucket); the others as their classes compute them.",
  });
  place.querySelector(".see").textContent = seenInCompared(compared, trained, factor);
}

function seenInCompared(compared, trained, factor) {
  const end = Math.ceil(factor * trained) - 1, [words, has] = [[], (name) => compared.includes(name)];
  if (has("alibi")) words.push(`ALiBi falls with every token, its head ${state.head} to ${number(COMPARED.alibi(state)(end))} at offset ${number(end)}`);
  if (has("t5")) words.push(state.reach <= end ? `T5 is flat from ${number(state.reach)} on, its last bucket` : `T5's buckets reach further than this context`);
  if (has("rope")) {
    const before = plain(state.dim, state.base), options = { factor, original_max_length: trained, max_length: end + 1 };
    const after = SCHEMES[state.scheme]?.(state.dim, state.base, options) ?? before;
    words.push(`RoPE wavers, and in the shaded part ${percent(unseen(before, after, trained, factor))} of its pairs reach angles that training never showed`);
  }
  return words.length ? `${words.join("; ")}. Drag a slider.` : compared.length ? "Drag a slider." : "Choose encodings to compare.";
}

panel("compare", ["compared", "trained", "factor", "heads", "head", "dim", "base", "scheme", "reach", "a", "p"], comparedPanel);


// ---- scores of given vectors ----
function scoresPanel(place) {
  const { dim, base, trained, factor, scheme, vectors, seed } = state, end = Math.ceil(factor * trained);
  only(place, "preferred", vectors === "k prefers an offset");
  only(place, "seed", vectors === "random");
  const options = { factor, original_max_length: trained, max_length: end }, theta = SCHEMES[scheme]?.(dim, base, options) ?? plain(dim, base);
  const x = offsetsTo(end - 1, 320), draws = vectors === "random" ? [seed, seed + 1, seed + 2] : [seed];
  const lines = draws.map((each, i) => {
    const [q, k] = vectorsOf({ ...state, seed: each }, theta);
    return { name: vectors === "random" ? `random q and k, draw ${each}` : vectors, x, y: x.map((offset) => cosine(q, k, offset, theta)), faint: i > 0 };
  });
  draw(place.querySelector("figure"), {
    title: "Score of one query and one key, by offset", x: "offset (query - key)", y: "cosine of q and k", logX: true, lines, shade: trained, range: [-0.2, 1],
    marks: [{ words: `trained: ${number(trained)}`, at: trained }, ...(vectors === "k prefers an offset" ? [{ words: `preferred: ${number(state.preferred)}`, at: state.preferred }] : [])],
    caption: "q.k after the rotation, over the product of their lengths. Shaded: beyond the trained length.",
  });
  const best = lines[0].x[lines[0].y.indexOf(Math.max(...lines[0].y))];
  place.querySelector(".see").textContent = {
    "all alike": "For vectors whose dimensions are all alike the score falls with the distance. That is a property of these vectors, not of the rotation: choose others.",
    "k prefers an offset": `The same rotation, and the score is highest ${number(state.preferred)} tokens back: this key is the query, rotated by that many positions. Heads that look a fixed number of tokens back are learned so.`,
    random: `A random key has no reason to decay: the best offset of this draw is ${number(best)}.`,
  }[vectors];
}

// ---- a rotation: its wavelengths, what schemes do to them ----
function wavelengths(figure, facts, chosen, factor) {
  const { rotation } = facts, dim = rotaryDim(rotation), L = rotation.trained, pairs = range(facts.pairs), whole = (theta) => rotating(rotation, theta).map((each) => 2 * Math.PI / each);
  const options = { factor, original_max_length: L, max_length: Math.ceil(factor * L) };
  const shown = { [NO_SCHEME]: plain(dim, rotation.base), ...(SCHEMES[chosen] && { [`${chosen}, s = ${number(factor)}`]: SCHEMES[chosen](dim, rotation.base, options) }) };
  draw(figure, {
    title: "Positions of one full rotation, by pair", x: "rotary pair", y: "positions", logY: true,
    lines: Object.entries(shown).filter(([, theta]) => theta).map(([name, theta]) => ({ name, x: pairs, y: whole(theta) })),
    levels: [{ words: `trained length: ${number(L)}`, at: L, left: true }], marks: facts.turned < facts.pairs ? [{ words: `border: ${facts.turned}`, at: facts.turned }] : [],
    caption: "A pair whose wavelength is above the trained length saw only a part of its circle: a longer context takes it to angles that are new.",
  });
}

function slowed(figure, { rotation, pairs, turned }, factor, where = "") {
  const dim = rotaryDim(rotation), before = plainOf(rotation), options = { factor, original_max_length: rotation.trained, max_length: Math.ceil(factor * rotation.trained) };
  const lines = Object.entries(SCHEMES).map(([name, scheme], colour) => ({ name, colour, x: range(pairs), theta: scheme(dim, rotation.base, options) }))
    .filter(({ theta }) => theta).map(({ theta, ...line }) => ({ ...line, y: before.map((each, k) => each / theta[k]) }));
  const unique = [];
  for (const line of lines) {
    const same = unique.find((other) => other.y.every((y, i) => Math.abs(y - line.y[i]) < 1e-9 * y));
    if (same) same.name += ` and ${line.name}`; else unique.push(line);
  }
  draw(figure, {
    title: `How many times slower each pair rotates, by scheme, s = ${number(factor)}${where}`, x: "rotary pair", y: "times slower", lines: unique, range: [1, factor],
    marks: turned < pairs ? [{ words: `border: ${turned}`, at: turned }] : [],
    caption: `Frequencies before a scheme over those after it. Pairs from the border on never finished a rotation within ${number(rotation.trained)} tokens.`,
  });
}

const percent = (share) => `${Math.round(100 * share)}%`;

function longerTable(place, facts, where = "") { // what 2, 4, 8 times the length does
  const factors = [...new Set(facts.longer.map((row) => row.factor))], names = [...new Set(facts.longer.map((row) => row.scheme))];
  const head = ["scheme", ...factors.map((factor) => `new at ${number(factor * facts.rotation.trained)}`), "longest wave", "neighbours", "cos, sin"];
  const rows = names.map((name) => {
    const own = facts.longer.filter((row) => row.scheme === name), last = own.at(-1);
    return [name, ...own.map((row) => row.refused ? "not there" : percent(row.unseen)), ...(last.refused ? ["", "", ""] : [number(last.slowest), `1/${number(last.fastest)}`, number(last.temperature)])];
  });
  const cells = (row, i) => element("tr", {}, ...row.map((cell, j) => element(j && i ? "td" : "th", { scope: i ? (j ? undefined : "row") : "col" }, cell)));
  place.replaceChildren(
    element("p", { class: "quiet" }, `The share of rotating pairs at angles that training never met, at ${factors.map(number).join(", ")} times the length; and at the longest: positions of the slowest rotation, the angle between neighbours of the fastest pair compared with training, and what cos and sin are multiplied by.`),
    element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `What longer contexts do under each scheme${where}` }, element("table", {}, element("thead", {}, cells(head, 0)), element("tbody", {}, ...rows.map((row) => cells(row, 1))))));
}

function rotationPanel(place) {
  const { dim, base, trained, factor, scheme } = state, [first, second] = place.querySelectorAll("figure");
  const facts = rotationFacts({ layers: ALL, base, head_dim: dim, share: 1, proportion: 1, trained, window: null, scheme: null });
  wavelengths(first, facts, scheme, factor);
  slowed(second, facts, factor);
  longerTable(place.querySelector(".longer"), facts);
  place.querySelector(".see").textContent = borderOf(facts);
}

function borderOf({ turns, turned, pairs, rotation }) {
  const within = `${number(rotation.window ?? rotation.trained)} tokens`;
  if (turned === pairs) return `Every pair finishes a rotation within ${within}: no angle is new at any length.`;
  return `Within ${within} the fastest pair rotates ${number(turns[0])} times, the slowest ${number(turns.at(-1))} times: pairs ${turned} to ${pairs - 1}, ${percent((pairs - turned) / pairs)} of them, never finished one.`;
}

panel("scores", ["vectors", "preferred", "seed", "trained", "factor", "dim", "base", "scheme"], scoresPanel);
panel("rotation", ["trained", "factor", "dim", "base", "scheme"], rotationPanel);
