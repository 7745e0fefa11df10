"use strict";
// Every registered encoding, as its class drew it when the page was written.
function drawnPanel(place) {
  const each = AHEAD.encodings.find(({ label }) => label === state.encoding), drawings = each.drawings[state.length], head = `head ${state.head}`;
  const many = drawings.some(({ lines }) => lines?.some(({ name }) => name === head) && lines.length > 1);
  only(place, "head", many);
  place.querySelector(".formula").textContent = each.formula;
  const [, words, link] = each.source.match(/^(.*?)(https?:\S+)?$/s);
  place.querySelector(".source").replaceChildren(`Acts as ${each.acts || "nothing"}. `, words.replace(/,\s*$/, ""), ...(link ? [": ", element("a", { href: link }, link)] : []));
  const figures = place.querySelector(".drawings");
  while (figures.children.length > drawings.length) figures.lastChild.remove();
  while (figures.children.length < drawings.length) figures.append(element("figure"));
  drawings.forEach((drawing, i) => {
    const lines = drawing.lines?.map((line) => ({ ...line, y: line.y.map((y) => y ?? NaN), faint: many && drawing.lines.some(({ name }) => name === head) && line.name !== head }));
    draw(figures.children[i], { ...drawing, ...(lines && { lines }) });
  });
}

panel("drawn", ["encoding", "length", "head"], drawnPanel);
