"use strict";
// Mistakes of docs/errata.md: what is right and what is not, side by side.
const ERRATA = {
  ntk({ dim, base, factor }) {
    const before = plain(dim, base), times = (other) => plain(dim, other).map((theta, k) => before[k] / theta), pairs = range(dim / 2);
    const right = times(ntkBase(base, factor, dim)), wrong = times(wrongNtkBase(base, factor, dim));
    return {
      x: "rotary pair", y: "times slower", range: [1, factor], levels: [{ words: `s = ${number(factor)}`, at: factor }],
      right: ["base times s^(d/(d-2))", [{ name: "times slower", x: pairs, y: right }]], wrong: ["base times s^(2/(d-2)), as in a book chapter", [{ name: "times slower", x: pairs, y: wrong }]],
      see: `NTK-aware scaling enlarges the base so that the slowest pair rotates s = ${number(factor)} times slower, and the fastest as before. With the exponent 2/(d-2) the slowest is only ${wrong.at(-1).toPrecision(5)} times slower: hardly anything is scaled, and the new length is as unknown as before.`,
    };
  },
  floor({ trained, factor }) {
    const x = range(49), steps = x.flatMap((p) => [p, p + 0.999]), shared = sharedPositions(factor, trained), end = Math.ceil(factor * trained);
    return {
      x: "position", y: "position that rotates", range: [0, 48 / factor],
      right: ["p / s, a fraction", [{ name: "rotated as", x, y: x.map((p) => p / factor) }]], wrong: ["p / s rounded down, as in a book chapter", [{ name: "rotated as", x: steps, y: steps.map((p) => Math.floor(Math.floor(p) / factor)) }]],
      see: shared ? `Position interpolation keeps fractions. Rounded down, ${number(shared)} of the ${number(end - 1)} pairs of neighbours among ${number(end)} tokens have one position, so attention cannot tell which came first.` : "With s = 1 nothing is interpolated: choose a larger factor.",
    };
  },
  ramp({ dim, base, trained, factor }) {
    const before = plain(dim, base), options = { factor, original_max_length: trained }, pairs = range(dim / 2), kept = (theta) => (theta || before).map((each, k) => each / before[k]);
    const right = SCHEMES.yarn(dim, base, options), wrong = invertedYarn(dim, base, options);
    if (!right) return { refused: `No pair finishes a rotation within ${number(trained)} tokens, so YaRN has no ramp here, and its class refuses it: choose a longer trained length.` };
    const times = (share) => share > 0.999 ? "keeps its speed" : `is slowed ${number(1 / share)} times`;
    return {
      x: "rotary pair", y: "share of its frequency kept", range: [0, 1],
      right: ["fast pairs stay, slow ones are interpolated", [{ name: "kept", x: pairs, y: kept(right) }]], wrong: ["upside down, as in litgpt", [{ name: "kept", x: pairs, y: kept(wrong) }]],
      see: `YaRN leaves fast pairs alone, which tell neighbours apart, and slows those that never finished a rotation. Upside down, the fastest pair ${times(kept(wrong)[0])} and the slowest ${times(kept(wrong).at(-1))}: neighbours blur, and far positions stay at angles that training never met.`,
    };
  },
  layout({ dim, base, seed, trained }) {
    const theta = plain(dim, base), q = gaussians(2 * seed, dim), k = gaussians(2 * seed + 1, dim), x = offsetsTo(trained - 1, 200);
    const line = (layout) => [{ name: layout, x, y: x.map((offset) => cosine(q, k, offset, theta, layout)) }], [half, other] = ["half", "interleaved"].map(line);
    const at = ticks(0, trained - 1, "offsets").reduce((best, offset) => Math.abs(half[0].y[x.indexOf(offset)] - other[0].y[x.indexOf(offset)]) > Math.abs(half[0].y[x.indexOf(best)] - other[0].y[x.indexOf(best)]) ? offset : best, 0);
    const values = [half, other].map(([{ y }]) => number(y[x.indexOf(at)]));
    return {
      x: "offset (query - key)", y: "cosine of q and k", logX: true, range: [-0.5, 0.5], right: ["half: pairs (k, k + d/2), as these were trained", half], wrong: ["interleaved: pairs (2k, 2k + 1)", other],
      see: `Both layouts are rotations, so nothing fails: but weights of one layout run in the other give other scores, at offset ${number(at)} a cosine of ${values[1]} for ${values[0]}. Reorder the dimensions of q and k, and they agree again.`,
    };
  },
};
const READS = { ntk: ["dim", "base", "factor"], floor: ["trained", "factor"], ramp: ["dim", "base", "trained", "factor"], layout: ["dim", "base", "trained", "seed"] };

function errataPanel(place) {
  for (const name of ["dim", "base", "trained", "factor", "seed"]) only(place, name, READS[state.erratum].includes(name));
  const shown = ERRATA[state.erratum](state), pair = place.querySelector(".pair");
  place.querySelector(".see").textContent = shown.refused ?? shown.see;
  pair.hidden = Boolean(shown.refused);
  if (shown.refused) return;
  const numbers = [...shown.right[1], ...shown.wrong[1]].flatMap((line) => line.y), range = [Math.min(...numbers, shown.range[0]), Math.max(...numbers, shown.range[1])];
  place.querySelectorAll("figure").forEach((figure, i) => {
    const [title, lines] = i ? shown.wrong : shown.right;
    draw(figure, { ...shown, title: `${i ? "Wrong" : "Right"}: ${title}`, caption: "", range, lines: lines.map((line) => ({ ...line, colour: i })) });
  });
}

panel("errata", ["erratum", "dim", "base", "trained", "factor", "seed"], errataPanel);
