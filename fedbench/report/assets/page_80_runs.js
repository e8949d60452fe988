// The table of runs: sortable, searchable, each row opens the details of its run.
const FIRST_ROWS = 1000; // further rows are built on request
let showAllRuns = false;

const runMetrics = data.metrics.map((metric) => metric.key);
const runColumns = [
  {
    key: "defense",
    text: (run) => (rowOfRun(run) ? defenseLabels[rowOfRun(run).defense] : run.title),
    order: (run) => rowOfRun(run)?.defense ?? 1e9,
  },
  ...data.keys.map((name) => ({
    key: name,
    text: (run) => (rowOfRun(run) ? labelOf(rowOfRun(run), name) : "-"),
    order: (run) => {
      const row = rowOfRun(run);
      if (!row) return 1e9;
      const at = labelsOf(name).indexOf(labelOf(row, name));
      return at;
    },
  })),
  { key: "seed", text: (run) => run.seed ?? "-", order: (run) => run.seed ?? 1e9, kind: "num" },
  ...runMetrics.map((key) => ({
    key,
    metric: true,
    title: withUnit(key),
    help: metricOf(key).help,
    text: (run) => atLeast(run.censored?.includes(key)) + formatMetric(key, run.metrics?.[key]),
    order: (run) => run.metrics?.[key] ?? null,
    kind: "num",
  })),
  { key: "status", text: (run) => run.status, order: (run) => run.status },
];

function sortedRuns(runs) {
  const [key, direction] = (state.get("runs.sort") ?? "").split(":");
  const column = runColumns.find((candidate) => candidate.key === key);
  if (!column) return runs;
  const sign = direction === "down" ? -1 : 1;
  const keyed = runs.map((run) => [column.order(run), run]);
  keyed.sort(([a], [b]) => {
    if (a === null || b === null) return (a === null) - (b === null); // undefined numbers stay last
    return sign * (a < b ? -1 : a > b ? 1 : 0);
  });
  return keyed.map(([, run]) => run);
}

const searchTexts = new Map();
function searchText(run) {
  if (!searchTexts.has(run)) {
    searchTexts.set(
      run,
      [
        run.id,
        run.title,
        run.path,
        run.status,
        run.reason,
        ...runColumns.map((column) => column.text(run)),
      ]
        .join(" ")
        .toLowerCase(),
    );
  }
  return searchTexts.get(run);
}

function matchingRuns() {
  const words = (state.get("runs.search") ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  return sortedRuns(
    shownRuns().filter((run) => words.every((word) => searchText(run).includes(word))),
  );
}

function runRow(run) {
  const index = runIndex.get(run);
  const cells = runColumns.map((column, i) => {
    const text = String(column.text(run));
    if (i === 0) {
      return el(
        "th",
        { scope: "row" },
        el(
          "button",
          { type: "button", class: "link", "aria-label": `Details of ${runName(run)}` },
          text,
        ),
      );
    }
    return column.metric
      ? el(
          "td",
          {
            class: "num",
            "data-metric": column.key,
            "data-value": run.metrics?.[column.key] ?? "",
          },
          text,
        )
      : el("td", { class: column.kind, "data-key": column.key }, text);
  });
  return el(
    "tr",
    {
      "data-run": run.id,
      "data-index": index,
      class: run.status === "finished" ? null : "unfinished",
    },
    cells,
  );
}

function sortBy(key) {
  const [now, direction] = (state.get("runs.sort") ?? "").split(":");
  choose("runs.sort", now !== key ? `${key}:up` : direction === "up" ? `${key}:down` : null);
  update("runs");
  $(`#runs th button[data-sort="${CSS.escape(key)}"]`).focus();
}

function runHead() {
  const [key, direction] = (state.get("runs.sort") ?? "").split(":");
  return el(
    "tr",
    {},
    runColumns.map((column) => {
      const sorted =
        column.key === key ? (direction === "down" ? "descending" : "ascending") : "none";
      return el(
        "th",
        { scope: "col", "aria-sort": sorted, class: column.kind, title: column.help || null },
        el(
          "button",
          { type: "button", "data-sort": column.key, onclick: () => sortBy(column.key) },
          column.title ?? column.key,
          el(
            "span",
            { class: "arrow", "aria-hidden": "true" },
            sorted === "ascending" ? "▲" : sorted === "descending" ? "▼" : "",
          ),
        ),
      );
    }),
  );
}

function buildRuns(body) {
  const search = el("input", {
    type: "search",
    id: "run-search",
    autocomplete: "off",
    spellcheck: "false",
    "data-control": "run-search",
  });
  let timer = 0;
  search.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      choose("runs.search", search.value);
      update("runs");
    }, 80);
  });
  const tbody = el("tbody", {
    onclick: (event) => {
      const row = event.target.closest("tr[data-index]");
      if (row && !getSelection().toString()) openRun(Number(row.dataset.index));
    },
  });
  body.replaceChildren(
    el(
      "div",
      { class: "controls" },
      el("div", { class: "control" }, el("label", { for: "run-search" }, "Search"), search),
      el("span", { id: "run-count", role: "status", "aria-live": "polite" }),
    ),
    el(
      "div",
      { class: "scroll tall", tabindex: 0, role: "region", "aria-label": "Table of runs" },
      el("table", { id: "run-table", class: "runs" }, el("thead", {}), tbody),
    ),
    el("p", { id: "more-runs" }),
  );
}

section("runs", (body) => {
  if (!$("#run-table")) buildRuns(body);
  const runs = matchingRuns();
  const shown = showAllRuns || printing ? runs : runs.slice(0, FIRST_ROWS);
  const search = $("#run-search");
  if (search !== document.activeElement) search.value = state.get("runs.search") ?? "";
  $("#run-table thead").replaceChildren(runHead());
  $("#run-table tbody").replaceChildren(...shown.map(runRow));
  $("#run-count").textContent = `${plural(runs.length, "run")} of ${data.runs.length}`;
  const more = $("#more-runs");
  more.hidden = shown.length === runs.length;
  more.replaceChildren(
    el(
      "button",
      {
        type: "button",
        onclick: () => {
          showAllRuns = true;
          update("runs");
        },
      },
      `Show all ${runs.length} runs`,
    ),
  );
});
