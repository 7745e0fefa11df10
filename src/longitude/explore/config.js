"use strict";
// A config.json of Hugging Face, read as transformers and `longitude show` read it. What is not understood is refused by name.
class Refused extends Error {}
const refuse = (words) => { throw new Refused(words); };
const full = (x) => isObject(x) && Object.keys(x).length > 0;
const isObject = (x) => typeof x === "object" && x !== null && !Array.isArray(x);
const ORIGINAL = "original_max_position_embeddings", ALL = "all layers";
const FACTORS = [2, 4, 8];

function readConfig(text) { // -> the facts that `longitude show CONFIG.json --json` prints
  let raw;
  try { raw = JSON.parse(text); } catch (error) { refuse(`This is not readable JSON (${error.message}). Expected the config.json of a Hugging Face model.`); }
  if (!isObject(raw) || typeof raw.model_type !== "string") refuse("It names no model_type: expected the config.json of a Hugging Face model.");
  let name = raw.model_type;
  if (raw.longitude_positions || name.startsWith("longitude")) refuse(`Its positions are Longitude's own; ${TERMINAL} reads them.`);
  if (familyOf(name).text) {
    if (!isObject(raw.text_config)) refuse(`A ${name} model keeps its positions in text_config, and there is none; ${TERMINAL} knows its defaults.`);
    name = raw.text_config.model_type ?? familyOf(name).text;
    raw = raw.text_config;
  }
  return factsOf(name, familyOf(name), raw);
}

const TERMINAL = "longitude show config.json, in a terminal,";

function familyOf(name) {
  const known = Object.hasOwn(AHEAD.configs.families, name) && AHEAD.configs.families[name];
  return known || refuse(`This page does not know models of type ${JSON.stringify(name)}, so it says nothing of them; ${TERMINAL} reads every model of transformers. It knows ${Object.keys(AHEAD.configs.families).join(", ")}.`);
}

function factsOf(model, family, raw) {
  const notes = [], value = (key) => raw[family.names[key]] ?? raw[key] ?? family.defaults[key] ?? null;
  const size = (key) => Number.isInteger(value(key)) && value(key) > 0 ? value(key) : refuse(`Expected ${key} to be a whole number above 0, got ${JSON.stringify(value(key))}.`);
  const lengths = AHEAD.configs.lengths.map(value).filter((each) => each !== null);
  const declared = lengths.find((each) => Number.isInteger(each) && each > 0) ?? null;
  const layers = layersOf(family, raw, value, size), kind = kindOf(family, raw);
  const facts = { model_type: model, kind: [kind], declared, trained: declared, layers, rotations: [], notes };
  if (kind !== "rotary") {
    if (full(raw.rope_scaling) || full(raw.rope_parameters)) refuse(`It has rotary parameters, and a ${model} model has none; remove what is wrong.`);
    return facts;
  }

  const ropes = ropesOf(model, family, raw, declared, notes);
  const originals = [...Object.values(ropes).map((rope) => rope.given[ORIGINAL]), value(ORIGINAL)];
  facts.trained = originals.find((each) => Number.isInteger(each) && each > 1) ?? declared;
  if (facts.trained === null) refuse(`Expected a length that the model was trained at, under ${AHEAD.configs.lengths.join(", ")}; got none.`);
  if ("head_dim" in raw && (family.fixed_head_dim || (raw.head_dim === null && !family.derived_head_dim))) refuse(`This page does not know what head_dim ${JSON.stringify(raw.head_dim)} means in a ${model} model; leave it out, or write the number.`);
  const headDim = value("qk_rope_head_dim") ?? raw.head_dim ?? family.defaults.head_dim ?? Math.floor(size("hidden_size") / size("num_attention_heads"));
  if (!Number.isInteger(headDim) || headDim < 1) refuse(`Expected head_dim to be a whole number above 0, got ${JSON.stringify(headDim)}.`);
  const windows = Object.values(layers).map((each) => each.window ?? null), common = windows.includes(null) ? null : Math.max(...windows);
  for (const [type, rope] of Object.entries(ropes)) {
    const window = type === ALL ? common : layers[type]?.window ?? null;
    facts.rotations.push(rotationFacts({ ...rope, layers: type, head_dim: headDim, trained: facts.trained, window: window !== null && window < facts.trained ? window : null }));
  }
  return facts;
}

function kindOf(family, raw) {
  if (family.kind === "alibi") return raw.attn_config?.alibi === false ? refuse("It switches ALiBi off, and this page does not know what it has instead.") : "alibi";
  if (raw.alibi === true) return "alibi";
  return family.kind ?? ("relative_attention_num_buckets" in family.defaults ? "t5" : "rotary");
}

// ---- layers and windows ----
function layersOf(family, raw, value, size) {
  const count = size("num_hidden_layers");
  if (raw.use_bidirectional_attention) refuse("use_bidirectional_attention changes the window in a way that this page does not know.");
  const used = (raw.use_sliding_window ?? family.defaults.use_sliding_window) !== false;
  if (raw.use_sliding_window === true && family.defaults.use_sliding_window === false && !Object.hasOwn(raw, "sliding_window")) refuse("use_sliding_window without sliding_window: write how many tokens the window has.");
  const given = Object.hasOwn(raw, "sliding_window") ? raw.sliding_window : family.defaults.sliding_window ?? null;
  const window = used && given ? given : null;
  if (window !== null && !(Number.isInteger(window) && window > 0)) refuse(`Expected sliding_window to be a whole number above 0, got ${JSON.stringify(window)}.`);
  const windows = { sliding_attention: window, chunked_attention: raw.attention_chunk_size ?? null }, kinds = {};
  for (const kind of layerTypes(family, raw, window, count)) {
    kinds[kind] ??= { layers: 0, ...(windows[kind] ? { window: windows[kind] } : {}) };
    kinds[kind].layers += 1;
  }
  return kinds;
}

function layerTypes(family, raw, window, count) {
  const written = raw.layer_types ?? null, pattern = raw.sliding_window_pattern ?? null;
  if (written !== null) {
    if (!Array.isArray(written) || written.length !== count || written.some((each) => typeof each !== "string")) refuse(`Expected layer_types to be a list of ${count} names, one for each layer.`);
    return written;
  }
  if (family.layer_types === null) return Array(count).fill(window ? "sliding_attention" : "full_attention");
  if (raw.use_sliding_window === true) {
    if (!family.window_layers) refuse("use_sliding_window without layer_types: this page does not know which layers have a window.");
    const from = raw.max_window_layers ?? family.defaults.max_window_layers;
    return range(count).map((i) => window && i >= from ? "sliding_attention" : "full_attention");
  }
  if (family.pattern && pattern !== null) {
    if (!Number.isInteger(pattern) || pattern < 1) refuse(`Expected sliding_window_pattern to be a whole number, got ${JSON.stringify(pattern)}; write layer_types.`);
    return range(count).map((i) => (i + 1) % pattern ? "sliding_attention" : "full_attention");
  }
  return range(count).map((i) => family.layer_types[i % family.layer_types.length]);
}

// ---- rotary parameters: {type of layers: {given, base, scheme, dim_share, proportion}} ----
function ropesOf(model, family, raw, declared, notes) {
  for (const key of ["rope_scaling", "rope_parameters"]) if (raw[key] !== undefined && raw[key] !== null && !isObject(raw[key])) refuse(`Expected ${key} to be an object or null, got ${JSON.stringify(raw[key])}.`);
  if (full(raw.rope_scaling) && full(raw.rope_parameters) && JSON.stringify(raw.rope_scaling) !== JSON.stringify(raw.rope_parameters)) refuse("It has both rope_parameters and rope_scaling, and they differ; remove the wrong one.");
  const defaults = family.defaults.rope_parameters ?? {}, nested = (each) => Object.values(each).some(isObject);
  const written = full(raw.rope_parameters) ? raw.rope_parameters : full(raw.rope_scaling) ? raw.rope_scaling : null;
  const baseKey = model === "gpt_neox" ? "rotary_emb_base" : "rope_theta", shareKey = model === "gpt_neox" ? "rotary_pct" : "partial_rotary_factor";
  if (model === "gpt_neox" && (raw.rope_theta ?? raw.partial_rotary_factor) !== undefined) refuse("A gpt_neox model calls them rotary_emb_base and rotary_pct, or has them in rope_parameters; write these.");
  if (nested(defaults) && full(raw.rope_parameters) && !nested(raw.rope_parameters)) refuse(`A ${model} model has rope_parameters for each type of its layers, and these are not.`);
  const share = raw[shareKey] ?? (nested(defaults) ? undefined : defaults.partial_rotary_factor);
  const one = (parameters, base, type) => {
    const given = { ...parameters };
    for (const [key, outside] of [["rope_theta", base], ["partial_rotary_factor", share]]) if ((given[key] ?? null) === null && outside !== undefined) given[key] = outside;
    if (written?.rope_theta === undefined && raw[baseKey] === undefined) notes.push(`${baseKey} is not written${type === ALL ? "" : ` for ${type}`}; transformers takes ${number(given.rope_theta)}`);
    return ropeOf(model, given, raw, declared, type === ALL, family);
  };
  if (written && nested(written)) return Object.fromEntries(Object.entries(written).filter(([, each]) => each !== null).map(([type, each]) => [type, one(isObject(each) ? each : refuse(`Expected an object for each type of layers, got ${type}.`), raw[baseKey] ?? baseOf(family, type), type)]));
  if (nested(defaults)) return {
    sliding_attention: one({ rope_type: "default" }, (model === "gemma3_text" ? raw.rope_local_base_freq : undefined) ?? baseOf(family, "sliding_attention"), "sliding_attention"),
    full_attention: one({ rope_type: "default", ...written }, raw.rope_theta ?? baseOf(family, "full_attention"), "full_attention"),
  };
  const fallback = (defaults.rope_type ?? "default") === "default" ? {} : defaults;
  if (!written && full(fallback) && (raw.rope_theta ?? raw.partial_rotary_factor) !== undefined) refuse(`It has rope_theta without rope_parameters, and this page does not know what a ${model} model takes then; write both.`);
  return { [ALL]: one(written ?? fallback, raw[baseKey] ?? baseOf(family, ALL), ALL) };
}

const baseOf = (family, type) => isObject(family.base) ? family.base[type] : family.base;

function ropeOf(model, given, raw, declared, flat, family) {
  const { types, common, old_types } = AHEAD.configs;
  given = Object.fromEntries(Object.entries(given).filter(([, each]) => each !== null));
  let kind = given.rope_type ?? given.type ?? "default";
  kind = old_types[kind] ?? (model === "phi3" && kind === "yarn" ? "longrope" : kind);
  if (model === "phi3" && !["default", "longrope"].includes(kind)) refuse(`A phi3 model has rope_type "longrope" or none, got ${JSON.stringify(kind)}.`);
  if (!Object.hasOwn(types, kind)) refuse(`Unknown rope_type ${JSON.stringify(kind)}: expected one of ${Object.keys(types).join(", ")}.`);
  const names = { ...types[kind].needed, ...types[kind].optional };
  if (given.max_position_embeddings === raw.max_position_embeddings) delete given.max_position_embeddings;
  const atTop = flat && !(ORIGINAL in family.defaults) ? raw[ORIGINAL] ?? null : null;
  if (["yarn", "longrope", "llama3"].includes(kind) && atTop !== null && atTop !== given[ORIGINAL]) refuse(`${ORIGINAL} is ${JSON.stringify(atTop)} at the top, and ${JSON.stringify(given[ORIGINAL] ?? null)} in the rotary parameters; write the right one in both, or in these alone.`);
  const original = (flat ? raw[ORIGINAL] ?? family.defaults[ORIGINAL] : undefined) ?? given[ORIGINAL];
  if (["yarn", "longrope", "llama3"].includes(kind)) given[ORIGINAL] = original ?? declared;
  for (const key of Object.keys(given)) if (!(key in names) && !common.includes(key) && key !== "type") refuse(`Unknown key ${JSON.stringify(key)} of rope_type ${JSON.stringify(kind)}: it has ${[...Object.keys(names), ...common].join(", ")}.`);
  for (const key of Object.keys(types[kind].needed)) if (!(key in given)) refuse(`rope_type ${JSON.stringify(kind)} needs ${key}, and there is none.`);
  for (const [key, each] of Object.entries(given)) checked(key, each);
  const options = Object.fromEntries(Object.entries(given).filter(([key]) => key in names).map(([key, each]) => [names[key], each]));
  const share = given.partial_rotary_factor ?? 1, proportional = kind === "proportional";
  const rope = { given, base: given.rope_theta, share: proportional ? 1 : share, proportion: proportional ? share : 1, scheme: null };
  if (!types[kind].scheme || (proportional && (options.factor ?? 1) === 1)) return rope;
  return { ...rope, scheme: schemeOf(kind, types[kind].scheme, options, declared) };
}

function schemeOf(kind, name, options, declared) {
  if (kind === "yarn") options.factor ??= declared / options.original_max_length;
  if (kind === "longrope") options.factor ??= Math.max(1, declared / options.original_max_length);
  if (kind === "dynamic") options.original_max_length ??= declared;
  if (["longrope", "dynamic"].includes(kind)) Object.assign(options, { follow: "sequence", max_length: null });
  if ("original_max_length" in AHEAD.configs.options[name] && !Number.isInteger(options.original_max_length)) refuse(`rope_type ${JSON.stringify(kind)} needs ${ORIGINAL} or max_position_embeddings, and there is neither.`);
  const whole = { name, ...AHEAD.configs.options[name], ...options };
  if (whole.factor !== null && whole.factor < 1) refuse(`${name}: expected a factor of 1 or more, got ${whole.factor}.`);
  if (whole.high_freq_factor <= whole.low_freq_factor) refuse("llama3: expected high_freq_factor above low_freq_factor.");
  if (whole.beta_fast <= whole.beta_slow) refuse(`${name}: expected beta_fast above beta_slow.`);
  return whole;
}

function checked(key, value) {
  const words = ["rope_type", "type"], flags = ["truncate", "mrope_interleaved"], lists = ["short_factor", "long_factor", "mrope_section"];
  const positive = (x) => typeof x === "number" && Number.isFinite(x) && x > 0;
  const right = words.includes(key) ? typeof value === "string" : flags.includes(key) ? typeof value === "boolean"
    : lists.includes(key) ? Array.isArray(value) && value.every((x) => key === "mrope_section" ? Number.isInteger(x) && x >= 0 : positive(x))
    : key === ORIGINAL ? Number.isInteger(value) && value > 0 : key === "partial_rotary_factor" ? typeof value === "number" && value >= 0 && value <= 1
    : key.startsWith("mscale") ? positive(value) || value === 0 : positive(value);
  if (!right) refuse(`${key} cannot be ${JSON.stringify(value)}.`);
}
