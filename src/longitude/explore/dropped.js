"use strict";
// A config.json that the reader drops, chooses or pastes: the table that `longitude show CONFIG.json` prints.
const EXAMPLES = {
  "Llama 3.1 8B": { model_type: "llama", hidden_size: 4096, num_attention_heads: 32, num_hidden_layers: 32, max_position_embeddings: 131072, rope_theta: 500000, rope_scaling: { rope_type: "llama3", factor: 8, low_freq_factor: 1, high_freq_factor: 4, original_max_position_embeddings: 8192 } },
  "Gemma 3 4B": { model_type: "gemma3", text_config: { model_type: "gemma3_text", hidden_size: 2560, num_hidden_layers: 34, sliding_window: 1024, rope_scaling: { rope_type: "linear", factor: 8 } } },
  "Qwen2.5 7B, YaRN": { model_type: "qwen2", hidden_size: 3584, num_attention_heads: 28, num_hidden_layers: 28, max_position_embeddings: 32768, rope_theta: 1000000, rope_scaling: { type: "yarn", factor: 4, original_max_position_embeddings: 32768 } },
  "BLOOM 560M": { model_type: "bloom", hidden_size: 1024, n_head: 16, n_layer: 24 },
  "GPT-2": { model_type: "gpt2", n_positions: 1024, n_embd: 768, n_head: 12, n_layer: 12 },
};

const about = document.getElementById("config"), result = about.querySelector(".result"), says = about.querySelector("[role=status]"), pasted = about.querySelector("textarea");

function show(text, name) {
  result.replaceChildren();
  try {
    const facts = readConfig(text);
    says.className = "";
    says.textContent = `${name}: a ${facts.model_type} model, positions: ${facts.kind.join(", ")}.`;
    result.append(element("dl", { class: "words" }, ...wordsOf(facts).flatMap(([head, words]) => [element("dt", {}, head), element("dd", {}, words)])));
    for (const each of facts.rotations) result.append(rotationOf(each, facts.model_type));
    for (const figure of result.querySelectorAll("figure")) figure.drawn();
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    says.className = "notice";
    says.textContent = `${name}: ${error.message}`;
  }
}

function wordsOf(facts) {
  const declared = facts.declared !== null && facts.declared !== facts.trained ? `; ${number(facts.declared)} are declared` : "";
  const layers = Object.entries(facts.layers).map(([kind, each]) => `${each.layers} of ${kind}${each.window ? ` over ${number(each.window)} tokens` : ""}`);
  const beyond = {
    learned: `Positions from ${number(facts.declared ?? NaN)} on do not exist: its table ends. longitude extend --method linear stretches it.`,
    alibi: "ALiBi's bias goes on falling at every distance: nothing needs to be scaled, and there are no rotations to draw.",
    t5: "T5's biases are learned for buckets of distances, and all far distances share the last: there are no rotations to draw.",
  }[facts.kind[0]];
  return [["trained at", (facts.trained === null ? "unknown" : `${number(facts.trained)} tokens`) + declared], ["layers", layers.join(", ")], ...(beyond ? [["beyond", beyond]] : []), ...facts.notes.map((note) => ["note", note])];
}

function rotationOf(facts, model) {
  const where = `, ${facts.layers} of the ${model} model`;
  const { scheme } = facts, options = scheme && Object.entries(scheme).filter(([key, value]) => key !== "name" && value !== null && !Array.isArray(value)).map(([key, value]) => `${key}=${value}`);
  const made = element("section", { class: "rotation" }, element("h3", {}, `${facts.layers}: base ${number(facts.base)}, ${facts.pairs} pairs of ${facts.head_dim} dimensions`));
  const lines = [["scheme", scheme ? [scheme.name, ...options].join(", ") : "none"], ["border", borderOf(facts)]];
  const scores = facts.attention_factor ** 2 * facts.softmax_factor;
  if (facts.attention_factor !== 1 || facts.softmax_factor !== 1) lines.push(["temperature", `cos and sin times ${number(facts.attention_factor)}, so scores times ${number(scores)}`]);
  if (facts.window !== null) lines.push(["longer", "Its offsets stay within the window at any length: no angle is new."]);
  const words = element("dl", { class: "words" }, ...lines.flatMap(([head, text]) => [element("dt", {}, head), element("dd", {}, text)]));
  const turns = element("figure"), longer = element("div"), times = element("figure");
  turns.drawn = () => draw(turns, {
    title: `Full rotations of each pair within ${number(facts.window ?? facts.rotation.trained)} tokens (${facts.layers})`, x: "rotary pair", y: "full rotations", logY: true, lines: [{ name: "rotations", x: range(facts.pairs), y: facts.turns }],
    levels: [{ words: "border: one full rotation", at: 1 }], caption: "Below 1 a pair never finished one: a longer context takes it to angles that are new.",
  });
  times.drawn = () => slowed(times, facts, 4, where);
  made.append(words, turns);
  if (facts.longer.length) { longerTable(longer, facts, where); made.append(longer, times); }
  return made;
}

const readFile = async (file) => { if (file) show(await file.text(), file.name); };
about.querySelector("input[type=file]").addEventListener("change", (event) => readFile(event.target.files[0]));
pasted.addEventListener("input", () => pasted.value.trim() ? show(pasted.value, "What you pasted") : result.replaceChildren());
for (const [name, config] of Object.entries(EXAMPLES)) {
  const button = element("button", { type: "button" }, name);
  button.addEventListener("click", () => { pasted.value = JSON.stringify(config, null, 2); show(pasted.value, name); });
  about.querySelector(".tools").append(button);
}
const zone = about.querySelector(".drop");
for (const kind of ["dragover", "dragleave", "drop"]) zone.addEventListener(kind, (event) => {
  event.preventDefault();
  zone.classList.toggle("over", kind === "dragover");
  if (kind === "drop") readFile(event.dataTransfer.files[0]);
});

// ---- everything is there: draw ----
addEventListener("hashchange", () => { fromAddress(); refresh(...Object.keys(CONTROLS)); });
fromAddress();
refresh(...Object.keys(CONTROLS));
