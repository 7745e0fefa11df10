"use strict";
// A function for each formula, in the notation of the papers; tests/explore/ compares every one with its class.
// d: dimensions that rotate, s: the factor, L: the trained length, k: a rotary pair, theta_k: its frequency.
const range = (n) => Array.from({ length: n }, (_, i) => i);
const clamp = (x, low, high) => Math.min(high, Math.max(low, x));
const dot = (q, k) => q.reduce((sum, x, i) => sum + x * k[i], 0);

// ---- frequencies and schemes: (d, base, options) -> theta [d/2]; options by the names of lg.scaling ----
const plain = (d, base) => range(d / 2).map((k) => base ** (-2 * k / d));
const ntkBase = (base, s, d) => base * s ** (d / (d - 2));
const blend = (theta, s, gamma) => theta.map((each, k) => (1 - gamma[k]) * each / s + gamma[k] * each);
const rotations = (theta, L) => theta.map((each) => L * each / (2 * Math.PI));

function rampInRotations(theta, L, slow, fast) {
  return rotations(theta, L).map((turns) => clamp((turns - slow) / (fast - slow), 0, 1));
}

function yarnBorders(d, base, { original_max_length: L, beta_fast = 32, beta_slow = 1, truncate = true }) {
  const pairOf = (turns) => d * Math.log(L / (2 * Math.PI * turns)) / (2 * Math.log(base));
  const low = truncate ? Math.floor(pairOf(beta_fast)) : pairOf(beta_fast);
  const high = truncate ? Math.ceil(pairOf(beta_slow)) : pairOf(beta_slow);
  if (!(base > 1) || !(high >= 0)) return null; // the ramp would run backwards: the class refuses it
  const [first, last] = [Math.max(low, 0), Math.min(high, d - 1)];
  return [first, first === last ? last + 0.001 : last];
}

function yarnFrequencies(d, base, options) {
  const theta = plain(d, base), { factor: s, original_max_length: L, beta_fast = 32, beta_slow = 1, ramp = "dimensions" } = options;
  if (ramp === "rotations") return blend(theta, s, rampInRotations(theta, L, beta_slow, beta_fast));
  const borders = yarnBorders(d, base, options);
  return borders && blend(theta, s, theta.map((_, k) => 1 - clamp((k - borders[0]) / (borders[1] - borders[0]), 0, 1)));
}

const SCHEMES = {
  linear: (d, base, { factor: s }) => plain(d, base).map((theta) => theta / s),
  ntk: (d, base, { factor: s }) => d < 4 ? null : plain(d, ntkBase(base, s, d)),
  dynamic_ntk: (d, base, { factor: s, original_max_length: L, max_length }) =>
    d < 4 ? null : plain(d, ntkBase(base, s * Math.max(max_length ?? L, L) / L - (s - 1), d)),
  ntk_by_parts: yarnFrequencies,
  yarn: yarnFrequencies,
  llama3: (d, base, { factor: s, original_max_length: L, low_freq_factor = 1, high_freq_factor = 4 }) =>
    blend(plain(d, base), s, rampInRotations(plain(d, base), L, low_freq_factor, high_freq_factor)),
};

// [what cos and sin are multiplied by, what the scale of the scores is multiplied by]
function temperatures(name, { factor: s, original_max_length: L, attention_factor, mscale, mscale_all_dim }) {
  const g = (m) => 0.1 * m * Math.log(s) + 1;
  if (name === "longrope") return [attention_factor ?? (s > 1 ? Math.sqrt(1 + Math.log(s) / Math.log(L)) : 1), 1];
  if (name !== "yarn") return [1, 1];
  const softmax = mscale_all_dim ? g(mscale_all_dim) ** 2 : 1;
  return [attention_factor ?? (mscale && mscale_all_dim ? g(mscale) / g(mscale_all_dim) : g(1)), softmax];
}

// ---- rotation: pairs are (2k, 2k + 1) in the interleaved layout, (k, k + d/2) in the half one ----
const place = (layout, pairs, k) => layout === "half" ? [k, k + pairs] : [2 * k, 2 * k + 1];

function rotate(x, position, theta, layout) {
  const out = [...x];
  theta.forEach((each, k) => {
    const [a, b] = place(layout, theta.length, k), cos = Math.cos(position * each), sin = Math.sin(position * each);
    out[a] = x[a] * cos - x[b] * sin;
    out[b] = x[a] * sin + x[b] * cos;
  });
  return out;
}

const score = (q, k, offset, theta, layout) => dot(rotate(q, offset, theta, layout), k);

// ---- biases of a score: offset = query - key ----
function alibiSlopes(heads) {
  const geometric = (n) => range(n).map((h) => 2 ** (-8 * (h + 1) / n));
  const power = 2 ** Math.floor(Math.log2(heads));
  return [...geometric(power), ...geometric(2 * power).filter((_, i) => i % 2 === 0).slice(0, heads - power)];
}

const alibi = (slope, offset) => -slope * Math.abs(offset);
const kerpleLog = (a, p, offset) => -p * Math.log1p(a * Math.abs(offset));
const kerplePower = (a, p, offset) => offset === 0 ? 0 : -a * Math.abs(offset) ** p;

function sandwich(head, heads, dim, offset) { // head = 1 .. heads
  const cosines = range(dim / 2).map((i) => Math.cos(offset * 10_000 ** (-2 * (i + 1) / dim)) - 1);
  return cosines.reduce((sum, x) => sum + x, 0) / (8 * head / heads);
}

function t5Bucket(offset, buckets = 32, maxDistance = 128, bidirectional = false) {
  const own = bidirectional ? buckets / 2 : buckets, exact = Math.floor(own / 2);
  const right = bidirectional && offset < 0 ? own : 0, n = bidirectional ? Math.abs(offset) : Math.max(offset, 0);
  if (n < exact) return right + n;
  const share = Math.log(n / exact) / Math.log(maxDistance / exact);
  return right + Math.min(own - 1, exact + Math.floor(share * (own - exact) + 1e-9)); // 1e-9: whole numbers stay whole
}

// ---- at the input ----
function sinusoid(position, dim, base) { // the paper's: sin, cos, sin, ...
  return range(dim).map((i) => (i % 2 ? Math.cos : Math.sin)(position * base ** (-2 * Math.floor(i / 2) / dim)));
}

// ---- what the first panel compares: the score at an offset less the score of the token itself ----
const t5Example = (offset, reach) => { // a table that holds -ln(1 + the first distance of each bucket)
  const bucket = t5Bucket(offset, 32, reach);
  let first = offset;
  if (bucket >= 16) for (first = 16; t5Bucket(first, 32, reach) < bucket;) first += 1;
  return -Math.log1p(first);
};

const COMPARED = { // settings -> offset -> change of the score; of a rotation for q = k = 1 in all dimensions
  rope({ dim, base, scheme, factor, trained }) {
    const options = { factor, original_max_length: trained, max_length: Math.ceil(factor * trained) };
    const theta = SCHEMES[scheme]?.(dim, base, options) ?? plain(dim, base), [cosine, softmax] = temperatures(scheme, options);
    return (offset) => theta.reduce((sum, each) => sum + 2 * (Math.cos(offset * each) - 1), 0) * cosine ** 2 * softmax / Math.sqrt(dim);
  },
  alibi({ head, heads }) {
    const slope = alibiSlopes(heads)[head - 1];
    return (offset) => alibi(slope, offset);
  },
  t5: ({ reach }) => (offset) => t5Example(offset, reach),
  kerple_log: ({ a, p }) => (offset) => kerpleLog(a, p, offset),
  kerple_power: ({ a, p }) => (offset) => kerplePower(a, p, offset),
  sandwich: ({ head, heads }) => (offset) => sandwich(head, heads, 128, offset),
};

// the share of pairs that meet angles above those of training, at s times the length
function unseen(before, after, L, s) {
  return before.filter((theta, k) => L * theta / (2 * Math.PI) < 1 && s * after[k] > theta * (1 + 1e-9)).length / before.length;
}

// ---- vectors ----
function gaussians(seed, count) { // mulberry32, then Box and Muller
  let at = seed * 0x9e3779b9 | 0;
  const uniform = () => {
    at = at + 0x6d2b79f5 | 0;
    let x = Math.imul(at ^ at >>> 15, 1 | at);
    x = x + Math.imul(x ^ x >>> 7, 61 | x) ^ x;
    return ((x ^ x >>> 14) >>> 0) / 2 ** 32;
  };
  return range(count).map(() => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform()));
}

const LAYOUT = "half";
function vectorsOf({ vectors, dim, preferred, seed }, theta) { // [q, k]
  const ones = Array(dim).fill(1);
  if (vectors === "random") return [gaussians(2 * seed, dim), gaussians(2 * seed + 1, dim)];
  return [ones, vectors === "all alike" ? ones : rotate(ones, preferred, theta, LAYOUT)];
}

const cosine = (q, k, offset, theta, layout = LAYOUT) => score(q, k, offset, theta, layout) / Math.sqrt(dot(q, q) * dot(k, k));

// ---- mistakes of docs/errata.md ----
const wrongNtkBase = (base, s, d) => base * s ** (2 / (d - 2));
const sharedPositions = (s, L) => Math.ceil(s * L) - 1 - Math.floor((Math.ceil(s * L) - 1) / s); // neighbours with one position, where positions are rounded down
function invertedYarn(d, base, options) {
  const theta = plain(d, base), [low, high] = yarnBorders(d, base, options) ?? [0, 0];
  return high && blend(theta, options.factor, theta.map((_, k) => clamp((k - low) / (high - low), 0, 1)));
}
