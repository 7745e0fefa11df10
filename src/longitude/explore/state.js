"use strict";
// What the reader has chosen: one state for all panels, its controls, and its place in the address.
const decade = (n) => [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8].map((m) => Number((m * 10 ** n).toPrecision(3)));
const powers = (from, to) => range(to - from + 1).map((i) => 2 ** (from + i));
const AHEAD = JSON.parse(document.getElementById("ahead").textContent);
const NO_SCHEME = "without a scheme";

// name -> what it is called, what it starts as, and its stops (a slider) or choices (a list)
const CONTROLS = {
  trained: { label: "trained length", start: 1024, stops: powers(5, 17) },
  factor: { label: "factor s (context / trained length)", start: 4, stops: [1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64] },
  heads: { label: "heads", start: 8, stops: [...range(16).map((i) => i + 1), 20, 24, 28, 32, 40, 48, 64] },
  head: { label: "head", start: 3, stops: (state) => range(state.heads).map((i) => i + 1) },
  dim: { label: "head_dim", start: 64, stops: [4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 192, 256] },
  base: { label: "base", start: 10_000, stops: [...range(6).flatMap((i) => decade(i + 1)), 1e7] },
  scheme: { label: "scheme of the rotation", start: NO_SCHEME, choices: [NO_SCHEME, ...Object.keys(SCHEMES)] },
  reach: { label: "t5: max_distance", start: 128, stops: powers(5, 11) },
  a: { label: "kerple: a", start: 0.5, stops: [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1] },
  p: { label: "kerple: p", start: 1, stops: [0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.2, 1.5, 2] },
  compared: { label: "encodings", start: ["rope", "alibi", "t5"], several: ["rope", "alibi", "t5", "kerple_log", "kerple_power", "sandwich"] },
  vectors: { label: "q and k", start: "all alike", choices: ["all alike", "k prefers an offset", "random"] },
  preferred: { label: "preferred offset", start: 64, stops: [0, ...powers(0, 12)] },
  seed: { label: "random draw", start: 1, stops: range(20).map((i) => i + 1) },
  encoding: { label: "encoding", start: "alibi", choices: AHEAD.encodings.map((each) => each.label) },
  length: { label: "length", start: "1024", choices: Object.keys(AHEAD.encodings[0].drawings) },
  erratum: { label: "mistake", start: "ntk", choices: { ntk: "NTK's exponent", floor: "rounded positions", ramp: "YaRN's ramp upside down", layout: "mixed layouts" } },
};

const state = Object.fromEntries(Object.entries(CONTROLS).map(([name, control]) => [name, control.start]));
const drawers = []; // [the controls that it reads, a function that draws again]
const stopsOf = (name) => typeof CONTROLS[name].stops === "function" ? CONTROLS[name].stops(state) : CONTROLS[name].stops;
const namesOf = (choices) => Array.isArray(choices) ? choices : Object.keys(choices);

// ---- the address ----
function toAddress() {
  const changed = Object.entries(CONTROLS).filter(([name, control]) => String(state[name]) !== String(control.start));
  const hash = changed.map(([name]) => `${name}=${encodeURIComponent(state[name])}`).join("&");
  history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
}

function fromAddress() {
  const refused = [];
  for (const [name, control] of Object.entries(CONTROLS)) state[name] = control.start;
  for (const part of location.hash.slice(1).split("&").filter(Boolean)) {
    const [name, text] = [part.split("=")[0], decoded(part.split("=").slice(1).join("="))], control = CONTROLS[name];
    const value = !control ? null : control.stops ? within(name, text) : control.choices ? namesOf(control.choices).find((each) => each === text) : text.split(",").filter((each) => control.several.includes(each));
    if (value === null || value === undefined || (value === "") || (Array.isArray(value) && String(value) !== text)) refused.push(part);
    else state[name] = value;
  }
  state.head = Math.min(state.head, state.heads);
  const notice = document.getElementById("address");
  notice.hidden = !refused.length;
  notice.textContent = `The address says ${refused.join(", ")}, which this page does not have; it is left out.`;
}

function decoded(text) {
  try { return decodeURIComponent(text); } catch { return text; }
}

function within(name, text) {
  const stops = CONTROLS[name].stops === stopsOf(name) ? CONTROLS[name].stops : range(64).map((i) => i + 1);
  return text !== "" && stops.includes(Number(text)) ? Number(text) : null;
}

// ---- controls ----
function control(name) {
  const { label, stops, choices, several } = CONTROLS[name];
  return several ? boxes(name, label, several) : choices ? list(name, label, choices) : slider(name, label, stops);
}

function slider(name, label) {
  const input = element("input", { type: "range", min: 0, step: 1 }), value = element("output", { "aria-hidden": "true" });
  const made = element("label", { class: "control" }, element("span", {}, label, " ", value), input);
  input.addEventListener("input", () => set(name, stopsOf(name)[Number(input.value)]));
  made.refresh = () => {
    const stops = stopsOf(name);
    input.max = stops.length - 1;
    input.value = stops.indexOf(state[name]);
    value.textContent = number(state[name]);
    input.setAttribute("aria-valuetext", number(state[name]));
  };
  return made;
}

function list(name, label, choices) {
  const words = (each) => Array.isArray(choices) ? each : choices[each];
  const input = element("select", {}, ...namesOf(choices).map((each) => element("option", { value: each }, words(each))));
  const made = element("label", { class: "control" }, element("span", {}, label), input);
  input.addEventListener("input", () => set(name, input.value));
  made.refresh = () => { input.value = state[name]; };
  return made;
}

function boxes(name, label, several) {
  const inputs = several.map((each) => element("input", { type: "checkbox", value: each }));
  const made = element("fieldset", { class: "boxes" }, element("legend", {}, label), ...inputs.map((input) => element("label", {}, input, input.value)));
  for (const input of inputs) input.addEventListener("input", () => set(name, inputs.filter((each) => each.checked).map((each) => each.value)));
  made.refresh = () => { for (const input of inputs) input.checked = state[name].includes(input.value); };
  return made;
}

function set(name, value) {
  state[name] = value;
  state.head = Math.min(state.head, state.heads);
  toAddress();
  refresh(name);
}

let waiting = new Set();
function refresh(...names) { // the panels that read one of these, once for each frame
  if (!waiting.size) requestAnimationFrame(() => {
    const changed = waiting;
    waiting = new Set();
    for (const made of document.querySelectorAll(".control, .boxes")) made.refresh();
    for (const [reads, again] of drawers) if (reads.some((name) => changed.has(name))) again();
  });
  for (const name of names) waiting.add(name);
}

function panel(id, reads, again) {
  const place = document.getElementById(id), bar = place.querySelector(".controls");
  bar.append(...reads.map(control));
  reads.forEach((name, i) => { bar.children[i].dataset.name = name; });
  drawers.push([[...reads, ...(reads.includes("head") ? ["heads"] : [])], () => again(place)]);
}

const only = (place, name, shown) => { place.querySelector(`[data-name=${name}]`).hidden = !shown; };
