// Tables: sorted by a column, by the data-value of their cells.
for (const head of document.querySelectorAll("table.sortable thead th")) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...head.childNodes);
  head.append(button);
  button.addEventListener("click", () => {
    const order = head.getAttribute("aria-sort") === "ascending" ? -1 : 1, body = head.closest("table").tBodies[0];
    const key = (row) => row.cells[head.cellIndex].dataset.value ?? "";
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", order === 1 ? "ascending" : "descending");
    body.append(...[...body.rows].sort((a, b) => {
      const [one, other] = [key(a), key(b)];
      if (one === "" || other === "") return (one === "") - (other === "");
      return order * (isNaN(one) || isNaN(other) ? one.localeCompare(other) : one - other);
    }));
  });
}
