"use strict";
// Charts as SVG: curves and shades, each with an alternative text and its numbers as a table.
const SVG = "http://www.w3.org/2000/svg", HEIGHT = 300, COLOURS = 7, DASHES = ["", "7 3", "2 2"];

function element(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "rect", "text", "circle"].includes(name);
  const made = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined && value !== false) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function number(value) { // as short as it can be read
  if (!Number.isFinite(value)) return "";
  if (value === 0) return "0";
  if (Number.isInteger(value) || Math.abs(value) >= 1000) return Math.abs(value) < 1e7 ? Math.round(value).toLocaleString("en") : value.toExponential(2).replace("e+", "e");
  return Math.abs(value) < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(3)));
}

function ticks(low, high, scale) {
  if (scale === "offsets") {
    const powers = [0, ...range(16).map((k) => 4 ** k)];
    return [...powers.slice(1).map((p) => -p).reverse(), ...powers].filter((p) => low <= p && p <= high);
  }
  if (scale === "log") {
    const [from, to] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const step = Math.max(1, Math.ceil((to - from) / 6)), few = to - from < 3 ? [1, 2, 5] : [1];
    return range(Math.floor((to - from) / step) + 1).flatMap((i) => few.map((m) => m * 10 ** (from + i * step))).filter((p) => low * 0.999 <= p && p <= high * 1.001);
  }
  let step = 10 ** Math.floor(Math.log10((high - low) || 1));
  step = [step / 5, step / 2, step, 2 * step].find((each) => (high - low) / each <= 6);
  const first = Math.ceil(low / step - 1e-9);
  return range(Math.floor(high / step + 1e-9) - first + 1).map((i) => Number(((first + i) * step).toPrecision(10)));
}

const SCALES = {
  linear: (x) => x,
  log: (x) => Math.log10(x),
  offsets: (x) => Math.sign(x) * Math.log2(Math.abs(x) + 1), // 0 has a place, and what is below mirrors what is above
};

function scaleOf(kind, low, high, from, to) {
  const f = SCALES[kind], [a, b] = [f(low), f(high)];
  return (x) => from + (f(x) - a) / ((b - a) || 1) * (to - from);
}

// ---- a figure: made once, drawn again whenever its numbers change ----
function skeleton(figure) {
  if (figure.parts) return figure.parts;
  const parts = { title: element(figure.dataset.heading ?? "h3"), caption: element("figcaption"), picture: element("div", { class: "picture" }), key: element("ul", { class: "key" }) };
  parts.summary = element("summary");
  parts.table = element("table");
  parts.scroll = element("div", { class: "scroll", tabindex: 0, role: "region" }, parts.table);
  parts.details = element("details", { class: "numbers" }, parts.summary, parts.scroll);
  parts.details.addEventListener("toggle", () => fill(figure));
  figure.append(parts.title, parts.picture, parts.key, parts.caption, parts.details);
  figure.parts = parts;
  new ResizeObserver(() => { if (figure.spec && parts.picture.clientWidth !== figure.width) draw(figure, figure.spec); }).observe(parts.picture);
  return parts;
}

function draw(figure, spec) {
  const parts = skeleton(figure);
  figure.spec = spec;
  figure.width = parts.picture.clientWidth;
  parts.title.textContent = spec.title;
  parts.caption.textContent = spec.caption;
  parts.summary.textContent = `${spec.title}: the numbers`;
  parts.scroll.setAttribute("aria-label", `${spec.title}: the numbers`);
  const width = Math.max(240, figure.width || 640);
  (spec.values ? shades : curves)(figure, spec, width);
  fill(figure);
}

function fill(figure) { // the table, where it is open
  const { details, table } = figure.parts, { spec } = figure;
  if (!details.open) return table.replaceChildren();
  const [head, rows] = spec.values ? tableOfShades(spec) : tableOfCurves(spec);
  table.replaceChildren(
    element("thead", {}, element("tr", {}, ...head.map((name) => element("th", { scope: "col" }, name)))),
    element("tbody", {}, ...rows.map(([first, ...cells]) => element("tr", {}, element("th", { scope: "row" }, first), ...cells.map((cell) => element("td", {}, cell))))));
}

function tableOfCurves(spec) {
  const at = [...new Set(spec.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const own = spec.lines.map((line) => new Map(line.x.map((x, i) => [x, line.y[i]])));
  return [[spec.x, ...spec.lines.map((line) => line.name)], at.map((x) => [number(x), ...own.map((line) => number(line.get(x) ?? NaN))])];
}

const tableOfShades = (spec) => [[spec.y, ...spec.columns.map(number)], spec.rows.map((row, i) => [row, ...spec.values[i].map((v) => number(v ?? NaN))])];

// ---- curves ----
function alternative(spec) {
  const ends = spec.lines.filter((line) => line.x.length).map((line) =>
    `${line.name} from ${number(line.y[0])} at ${number(line.x[0])} to ${number(line.y.at(-1))} at ${number(line.x.at(-1))}`);
  return `Line chart: ${spec.title}. ${spec.caption} ${ends.join("; ")}.`;
}

const seen = (line) => line.x.map((x, i) => [x, line.y[i]]).filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y));

function extent(numbers) {
  const low = Math.min(...numbers), high = Math.max(...numbers);
  return low < high ? [low, high] : [low - 0.5, high + 0.5];
}

function curves(figure, spec, width) {
  const { picture, key } = figure.parts, lines = spec.lines.map((line) => ({ ...line, points: seen(line) }));
  const xs = lines.flatMap((line) => line.points.map(([x]) => x)), ys = lines.flatMap((line) => line.points.map(([, y]) => y));
  const levels = spec.levels ?? [], marks = spec.marks ?? [];
  const [left, right] = extent(xs), kind = spec.logY ? "log" : "linear";
  let [low, high] = extent([...ys, ...levels.map((level) => level.at)]);
  if (spec.floor !== undefined && spec.floor !== null) low = Math.max(low, Math.min(spec.floor, high - 1));
  if (spec.range) [low, high] = [Math.min(low, spec.range[0]), Math.max(high, spec.range[1])];
  const steps = ticks(low, high, kind), margin = { left: 14 + 7.2 * Math.max(2, ...steps.map((y) => number(y).length)), right: 14, top: 24, bottom: 42 };
  const x = scaleOf(spec.logX ? "offsets" : "linear", left, right, margin.left, width - margin.right);
  const y = scaleOf(kind, low, high, HEIGHT - margin.bottom, margin.top);
  const bottom = HEIGHT - margin.bottom, svg = element("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-label": alternative(spec) });
  const text = (words, at, above, anchor = "middle", kindOf = "") => svg.append(element("text", { x: at, y: above, "text-anchor": anchor, class: kindOf }, words));

  if (spec.shade !== undefined && spec.shade < right) svg.append(element("rect", { class: "beyond", x: x(Math.max(spec.shade, left)), y: margin.top, width: x(right) - x(Math.max(spec.shade, left)), height: bottom - margin.top }));
  for (const step of steps) {
    svg.append(element("line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: y(step), y2: y(step) }));
    text(number(step), margin.left - 8, y(step) + 4, "end");
  }
  let end = -Infinity;
  for (const step of ticks(left, right, spec.logX ? "offsets" : "linear")) {
    const words = number(step), half = 3.6 * words.length;
    if (x(step) - half < end) continue;
    end = x(step) + half + 8;
    text(words, Math.min(x(step), width - half), bottom + 17);
  }
  svg.append(element("line", { class: "axis", x1: margin.left, x2: width - margin.right, y1: bottom, y2: bottom }));
  text(spec.x, (margin.left + width - margin.right) / 2, HEIGHT - 5, "middle", "title");
  text(spec.y, 0, 12, "start", "title");
  for (const { words, at, left: before } of levels) {
    svg.append(element("line", { class: "mark", x1: margin.left, x2: width - margin.right, y1: y(at), y2: y(at) }));
    text(words, before ? margin.left + 4 : width - margin.right, y(at) - 5, before ? "start" : "end");
  }
  for (const { words, at } of marks.filter((mark) => left <= mark.at && mark.at <= right)) {
    svg.append(element("line", { class: "mark", x1: x(at), x2: x(at), y1: margin.top, y2: bottom }));
    const before = x(at) + 7 * words.length > width;
    text(words, x(at) + (before ? -5 : 5), margin.top + 12, before ? "end" : "start");
  }
  const area = element("svg", { y: margin.top - 4, width, height: bottom - margin.top + 4, viewBox: `0 ${margin.top - 4} ${width} ${bottom - margin.top + 4}` }); // what is below ends here
  svg.append(area);
  lines.forEach((line, i) => {
    const path = line.points.map(([px, py], j) => `${j ? "L" : "M"}${x(px).toFixed(1)} ${clamp(y(py), -2000, 2000).toFixed(1)}`).join("");
    area.append(element("path", { d: path, class: `line c${(line.colour ?? i) % COLOURS}${line.faint ? " faint" : ""}`, "stroke-dasharray": DASHES[Math.floor((line.colour ?? i) / COLOURS) % 3] }));
    if (line.points.length <= 16) for (const [px, py] of line.points) area.append(element("circle", { class: `dot c${(line.colour ?? i) % COLOURS}`, cx: x(px), cy: y(py), r: 3 }));
  });
  const pointer = element("line", { class: "pointer", y1: margin.top, y2: bottom, visibility: "hidden" });
  svg.append(pointer);
  picture.replaceChildren(svg);
  legend(key, lines);
  follow(svg, pointer, key, lines, spec, x, width);
}

function legend(key, lines) {
  key.replaceChildren(...lines.map((line, i) => {
    const colour = (line.colour ?? i), dash = element("svg", { viewBox: "0 0 22 8", width: 22, height: 8, "aria-hidden": "true" },
      element("path", { d: "M0 4H22", class: `line c${colour % COLOURS}`, "stroke-dasharray": DASHES[Math.floor(colour / COLOURS) % 3] }));
    return element("li", { class: line.faint ? "faint" : undefined }, dash, line.name, element("span", { class: "value" }));
  }));
}

function follow(svg, pointer, key, lines, spec, x, width) { // the values where the pointer is
  svg.addEventListener("pointermove", (event) => {
    const at = event.offsetX * width / svg.clientWidth;
    const near = (line) => line.points.reduce((best, point) => Math.abs(x(point[0]) - at) < Math.abs(x(best[0]) - at) ? point : best, line.points[0] ?? [NaN, NaN]);
    const found = lines.map(near), first = found.find(([px]) => Number.isFinite(px));
    if (!first) return;
    for (const end of ["x1", "x2"]) pointer.setAttribute(end, x(first[0]));
    pointer.setAttribute("visibility", "visible");
    found.forEach(([px, py], i) => { key.children[i].querySelector(".value").textContent = ` ${number(py)} at ${number(px)}`; });
  });
  svg.addEventListener("pointerleave", () => {
    pointer.setAttribute("visibility", "hidden");
    for (const value of key.querySelectorAll(".value")) value.textContent = "";
  });
}

// ---- shades: a rectangle for each number ----
function shades(figure, spec, width) {
  const { picture, key } = figure.parts, numbers = spec.values.flat().filter((v) => v !== null);
  const least = spec.floor ?? Math.min(...numbers), most = Math.max(...numbers), diverges = least < 0 && most > 0;
  const reach = Math.max(-least, most), share = (v) => diverges ? (clamp(v, least, most) / reach + 1) / 2 : (clamp(v, least, most) - least) / ((most - least) || 1);
  const left = 12 + 7.2 * Math.max(...spec.rows.map((row) => row.length)), row = clamp(240 / spec.rows.length, 5, 24), top = 20, bottom = top + row * spec.rows.length;
  const column = (width - left - 8) / spec.columns.length, height = bottom + 40;
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Heat map: ${spec.title}. ${spec.caption}` });
  const every = Math.ceil(14 / row), apart = Math.ceil(44 / column);
  spec.rows.forEach((name, i) => {
    if (i % every === 0) svg.append(element("text", { x: left - 6, y: top + row * (i + 0.5) + 4, "text-anchor": "end" }, name));
    spec.values[i].forEach((v, j) => { if (v !== null) svg.append(element("rect", { x: left + j * column, y: top + i * row, width: column + 0.5, height: row + 0.5, fill: shade(share(v), diverges) })); });
  });
  spec.columns.forEach((name, j) => { if (j % apart === 0) svg.append(element("text", { x: left + (j + 0.5) * column, y: bottom + 16, "text-anchor": "middle" }, number(name))); });
  svg.append(element("text", { class: "title", x: 0, y: 12 }, spec.y), element("text", { class: "title", x: (left + width) / 2, y: height - 4, "text-anchor": "middle" }, spec.x));
  picture.replaceChildren(svg);
  key.replaceChildren(...[[least, spec.floor === undefined || spec.floor === null ? "" : " or less"], ...(diverges ? [[0, ""]] : []), [most, ""]].map(([v, more]) =>
    element("li", {}, element("span", { class: "swatch", style: `background:${shade(share(v), diverges)}` }), number(v) + more)));
}

const VIRIDIS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], BLUE_ORANGE = [[19, 75, 133], [134, 182, 222], [242, 240, 235], [240, 168, 96], [150, 70, 0]];
function shade(share, diverges) {
  const stops = diverges ? BLUE_ORANGE : VIRIDIS, at = clamp(share, 0, 1) * (stops.length - 1), i = Math.min(Math.floor(at), stops.length - 2);
  return `rgb(${stops[i].map((c, j) => Math.round(c + (at - i) * (stops[i + 1][j] - c))).join(" ")})`;
}
