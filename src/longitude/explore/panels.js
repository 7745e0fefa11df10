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
    title: "What distance does to a score", x: "offset (query - key)", y: "change of the score", logX: true, lines, floor: -16, range: [-4, 0],
    shade: trained, marks: [{ words: `trained: ${number(trained)}`, at: trained }],
    caption: "The score of a key at each offset, less that of the query's own token, before softmax: at −2.3 a key weighs a tenth. Shaded: beyond the trained length. "
      + "rope for q = k, all dimensions alike; t5 with an example table, which holds −ln(1 + the first distance of a bucket); the others as their classes compute them.",
  });
  place.querySelector(".see").textContent = seenInCompared(compared, trained, factor);
}

function seenInCompared(compared, trained, factor) {
  const end = Math.ceil(factor * trained) - 1, at = (name) => number(COMPARED[name](state)(end));
  const words = [];
  if (compared.includes("alibi")) words.push(`ALiBi's head ${state.head} falls on, to ${at("alibi")} at offset ${number(end)}`);
  if (compared.includes("t5")) words.push(`T5 has been flat since ${number(state.reach)}: its last bucket`);
  if (compared.includes("rope")) {
    const before = plain(state.dim, state.base), options = { factor, original_max_length: trained, max_length: end + 1 };
    const after = SCHEMES[state.scheme]?.(state.dim, state.base, options) ?? before;
    words.push(`RoPE does not fall, it turns: ${Math.round(100 * unseen(before, after, trained, factor))}% of its pairs meet angles there that training never showed`);
  }
  return words.length ? `${words.join("; ")}.` : "Choose encodings to compare.";
}

panel("compare", ["compared", "trained", "factor", "heads", "head", "dim", "base", "scheme", "reach", "a", "p"], comparedPanel);

addEventListener("hashchange", () => { fromAddress(); refresh(...Object.keys(CONTROLS)); });
fromAddress();
refresh(...Object.keys(CONTROLS));
