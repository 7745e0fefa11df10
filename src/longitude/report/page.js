"use strict";
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const specs = read("charts"), dark = read("dark"), night = matchMedia("(prefers-color-scheme: dark)");
const options = { renderer: "svg", actions: { export: true, source: false, compiled: false, editor: false }, tooltip: { theme: "custom" } };
const legend = document.querySelector(".legend"), places = document.querySelectorAll("[data-chart]");
const views = new Map(), chosen = new Set();

// ---- charts: drawn again when an axis or the colors change ----
function colored(spec) {
  let text = JSON.stringify(spec);
  if (night.matches) for (const color in dark) text = text.replaceAll(`"${color}"`, `"${dark[color]}"`);
  return JSON.parse(text);
}

function scalesOf(spec, channel) {
  if (spec === null || typeof spec !== "object") return [];
  const below = Object.values(spec).flatMap((part) => scalesOf(part, channel));
  return spec[channel]?.scale ? [spec[channel].scale, ...below] : below;
}

function endsOf(spec, channel) {
  if (spec === null || typeof spec !== "object") return [];
  const below = Object.values(spec).flatMap((part) => endsOf(part, channel));
  return typeof spec[channel]?.title === "string" ? [spec[channel], ...below] : below;
}

function fitted(spec, width) {
  if (width < 480 && spec.layer) spec.layer = spec.layer.filter((layer) => !layer.name?.startsWith("ends-")); // the legend has them
  const panels = (spec.concat ?? []).filter((panel) => typeof panel.width === "number");
  const size = spec.usermeta?.panel;
  if (size) return void (spec.columns = Math.max(1, Math.round(width / size))); // panels of letters do not stretch
  if (panels.length && width < 640) spec.columns = 1;
  for (const panel of panels) {
    panel.width = Math.max(200, Math.floor(width / (spec.columns ?? 1)) - 90);
    panel.title = { text: panel.title, limit: panel.width };
  }
}

const drawing = new Map(); // one after the other in a place
function draw(place) {
  drawing.set(place, (drawing.get(place) ?? Promise.resolve()).then(() => redraw(place)));
}

async function redraw(place) {
  const figure = place.closest("figure"), spec = structuredClone(specs[place.dataset.chart]);
  for (const button of figure.querySelectorAll("[data-axis]")) {
    const scales = scalesOf(spec, button.dataset.axis);
    if (!button.hasAttribute("aria-pressed")) button.setAttribute("aria-pressed", String(scales.some((scale) => /log$/.test(scale.type))));
    const log = button.getAttribute("aria-pressed") === "true";
    for (const end of endsOf(spec, button.dataset.axis)) {
      end.title = end.title.replace(/ \(log scale\)$/, "") + (log ? " (log scale)" : "");
      if (log && end.scale?.domain?.[0] <= 0) end.axis.values = [0, ...Array.from({ length: 12 }, (_, k) => 4 ** k).flatMap((x) => [x, -x])];
    }
    for (const scale of scales) {
      delete scale.base;
      scale.type = !log ? "linear" : scale.domain?.[0] <= 0 ? "symlog" : "log";
      if (scale.type === "log") scale.base = 2;
    }
  }
  if (spec.concat && chosen.size) spec.concat = spec.concat.filter((panel) => chosen.has(panel.description)); // a panel is of a label
  fitted(spec, place.clientWidth);
  const live = place.querySelector(".live") ?? place.appendChild(document.createElement("div"));
  live.className = spec.usermeta?.panel ? "live whole" : "live";
  if (spec.concat && !spec.concat.length) return live.replaceChildren();
  try {
    const { view } = await vegaEmbed(live, colored(spec), options);
    views.get(place)?.finalize();
    views.set(place, view);
    place.classList.add("drawn");
    live.querySelector("summary")?.setAttribute("aria-label", "Save this chart");
    figure.querySelector(".tools")?.removeAttribute("hidden");
    if (legend) {
      view.addEventListener("click", (event, item) => { if (item?.datum?.label) choose(item.datum.label); });
      legend.hidden = false;
      show(view);
    }
    window.dispatchEvent(new Event("resize"));
  } catch (error) {
    live.remove();
    console.error(error);
  }
}

for (const place of places) {
  draw(place);
  for (const button of place.closest("figure").querySelectorAll("[data-axis]")) button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
    draw(place);
  });
}
night.addEventListener("change", () => places.forEach(draw));

// ---- labels: those chosen are shown in all charts and tables; none chosen: all are ----
function show(view) {
  try { view.signal("picked", [...chosen]).runAsync(); } catch { /* a chart without labels */ }
}

function choose(label) {
  if (label === undefined) chosen.clear(); else if (!chosen.delete(label)) chosen.add(label);
  for (const button of legend.children) button.setAttribute("aria-pressed", String(button.dataset.label === undefined ? !chosen.size : chosen.has(button.dataset.label)));
  for (const row of document.querySelectorAll("tr[data-label]")) row.hidden = chosen.size > 0 && !chosen.has(row.dataset.label);
  for (const [place, view] of views) if (specs[place.dataset.chart].concat) draw(place); else show(view);
}
legend?.addEventListener("click", (event) => { const button = event.target.closest("button"); if (button) choose(button.dataset.label); });
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && chosen.size) choose(); });

// ---- print: what is folded is open ----
addEventListener("beforeprint", () => { for (const fold of document.querySelectorAll(".fold")) fold.open = true; });

// ---- tables: copied as CSV ----
function csvOf(table) {
  const quoted = (cell) => /[",]/.test(cell.textContent) ? `"${cell.textContent.replaceAll('"', '""')}"` : cell.textContent;
  return [...table.rows].map((row) => [...row.cells].map(quoted).join(",") + "\n").join("");
}

for (const button of document.querySelectorAll("[data-csv]")) {
  button.closest(".tools").hidden = false;
  button.addEventListener("click", async () => {
    const status = button.parentNode.querySelector("[role=status]");
    try {
      await navigator.clipboard.writeText(button.dataset.csv || csvOf(button.closest("details").querySelector("table")));
      status.textContent = "copied";
    } catch {
      status.textContent = "the browser does not let this page copy; results.parquet has the numbers";
    }
  });
}

// ---- what is folded is drawn at its width once it is open ----
for (const fold of document.querySelectorAll("details.fold")) fold.addEventListener("toggle", () => {
  if (fold.open) for (const place of fold.querySelectorAll("[data-chart]")) draw(place);
});
