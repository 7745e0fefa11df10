"use strict";
// What a rotation does within its trained length, and what longer contexts and schemes do to it.
// A rotation: {layers, base, head_dim, share, proportion, scheme, trained, window}.
const rotaryDim = ({ head_dim, share = 1 }) => Math.floor(head_dim * share);
const rotating = (rotation, theta) => theta.slice(0, Math.floor(Math.floor((rotation.proportion ?? 1) * rotaryDim(rotation)) / 2));
const plainOf = (rotation) => rotating(rotation, plain(rotaryDim(rotation), rotation.base));

function stretched(rotation, factor) { // a row for each scheme that a factor decides; what a class refuses has no numbers
  const before = plainOf(rotation), trained = rotation.trained, longest = 2 * Math.PI;
  const options = { factor, original_max_length: trained, max_length: Math.ceil(factor * trained) };
  const row = (scheme, theta) => {
    if (!theta) return { factor, scheme, refused: true };
    const after = rotating(rotation, theta);
    return { factor, scheme, unseen: unseen(before, after, trained, factor), slowest: longest / after.at(-1), fastest: before[0] / after[0], temperature: temperatures(scheme, options)[0] };
  };
  return [row(NO_SCHEME, plain(rotaryDim(rotation), rotation.base)), ...Object.keys(SCHEMES).map((name) => row(name, SCHEMES[name](rotaryDim(rotation), rotation.base, options)))];
}

function rotationFacts(rotation) {
  const dim = rotaryDim(rotation), theta = dim % 2 || dim < 2 ? [] : plainOf(rotation);
  if (!theta.length) refuse(`Expected head_dim times partial_rotary_factor to be even and above 0, got ${rotation.head_dim} times ${rotation.share}.`);
  const turns = rotations(theta, rotation.window ?? rotation.trained), { scheme } = rotation;
  for (const list of ["short_factor", "long_factor"]) if (scheme?.[list] && scheme[list].length !== dim / 2) refuse(`longrope: expected ${list} of ${dim / 2} numbers, one for each pair, got ${scheme[list].length}.`);
  if (scheme && SCHEMES[scheme.name] && !SCHEMES[scheme.name](dim, rotation.base, scheme)) refuse(`${scheme.name} does not go with a base of ${rotation.base} and ${dim} rotating dimensions at ${scheme.original_max_length ?? rotation.trained} tokens.`);

  const [attention_factor, softmax_factor] = scheme ? temperatures(scheme.name, scheme) : [1, 1];
  return {
    layers: rotation.layers, base: rotation.base, head_dim: rotation.head_dim, window: rotation.window, pairs: theta.length, scheme, turns,
    turned: turns.filter((each) => each >= 1).length, attention_factor, softmax_factor,
    longer: rotation.window === null ? FACTORS.flatMap((factor) => stretched(rotation, factor)) : [], rotation,
  };
}
