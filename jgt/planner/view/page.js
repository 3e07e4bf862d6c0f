"use strict";
// A click on a heading sorts its table: numbers from the largest, texts from A to Z. Another click reverses the order.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const key = (row) => row.cells[column].dataset.key;
    const numeric = rows.every((row) => key(row) !== "" && !Number.isNaN(Number(key(row))));
    const before = head.getAttribute("aria-sort");
    const order = before ? (before === "ascending" ? "descending" : "ascending") : (numeric ? "descending" : "ascending");
    const sign = order === "ascending" ? 1 : -1;
    rows.sort((a, b) => sign * (numeric ? Number(key(a)) - Number(key(b)) : key(a).localeCompare(key(b))));
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", order);
    body.append(...rows);
  }));
}
