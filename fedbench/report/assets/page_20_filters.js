// The filters at the top, which apply to the whole page.
const filterNames = unique([
  "defense",
  ...["attack", "dataset"].filter((key) => data.keys.includes(key)),
  ...sweptNames,
]);

/** Labels that a filter lets through; null if it lets all through. */
function filterOf(name) {
  const text = state.get(`f.${name}`);
  return text === undefined ? null : new Set(JSON.parse(text));
}

let passing = { rows: data.rows, active: [] };

function applyFilters() {
  const active = filterNames.map((name) => [name, safeFilter(name)]).filter(([, labels]) => labels);
  passing = {
    active,
    rows: data.rows.filter((row) =>
      active.every(([name, labels]) => labels.has(labelOf(row, name))),
    ),
  };
  passing.set = new Set(passing.rows);
}

/** A hand-edited address must not break the page. */
function safeFilter(name) {
  try {
    return filterOf(name);
  } catch {
    state.delete(`f.${name}`);
    return null;
  }
}

const shownRows = () => passing.rows;
/** Runs without readable settings belong to no row: they show unless a filter is set. */
const isShown = (run) =>
  run.row >= 0 ? passing.set.has(data.rows[run.row]) : !passing.active.length;
const shownRuns = () => data.runs.filter(isShown);
const shownDefenses = () => {
  const found = new Set(shownRows().map((row) => row.defense));
  return data.defenses.map((_, index) => index).filter((index) => found.has(index));
};
const passes = (name, label) =>
  passing.active.every(([key, labels]) => key !== name || labels.has(label));

function toggleFilter(name, label, on) {
  const all = labelsOf(name);
  const now = filterOf(name) ?? new Set(all);
  if (on) now.add(label);
  else now.delete(label);
  const kept = all.filter((value) => now.has(value));
  choose(`f.${name}`, kept.length === all.length ? null : JSON.stringify(kept));
  filtersChanged();
}

function filtersChanged() {
  applyFilters();
  drawFilters();
  updateAll();
}

function resetFilters() {
  filterNames.forEach((name) => state.delete(`f.${name}`));
  writeHash();
  filtersChanged();
}

function filterGroup(name) {
  const labels = labelsOf(name);
  const chosenLabels = filterOf(name);
  return el(
    "fieldset",
    { class: "filter" },
    el("legend", {}, name),
    el(
      "div",
      { class: "choices" },
      labels.map((label) => {
        const id = `filter-${name}-${labels.indexOf(label)}`;
        const box = el("input", {
          type: "checkbox",
          id,
          value: label,
          "data-filter": name,
          checked: !chosenLabels || chosenLabels.has(label),
        });
        box.addEventListener("change", () => toggleFilter(name, label, box.checked));
        return el("span", { class: "choice" }, box, el("label", { for: id }, label));
      }),
    ),
  );
}

function drawFilters() {
  const body = $("#filters .body");
  const runs = shownRuns().length;
  if (!body.firstChild) {
    body.append(
      el(
        "div",
        { class: "filter-groups" },
        filterNames.filter((name) => labelsOf(name).length).map(filterGroup),
      ),
      el(
        "div",
        { class: "filter-foot" },
        el(
          "button",
          { type: "button", "data-action": "reset-filters", onclick: resetFilters },
          "Reset filters",
        ),
        el("span", { id: "filter-count", role: "status", "aria-live": "polite" }),
      ),
    );
  }
  for (const box of $$("input[data-filter]", body)) {
    const labels = filterOf(box.dataset.filter);
    box.checked = !labels || labels.has(box.value);
  }
  $("[data-action=reset-filters]", body).disabled = !passing.active.length;
  $("#filter-count").textContent = `${runs} of ${plural(data.runs.length, "run")} shown`;
  const note = $("#nav-filter");
  note.hidden = !passing.active.length;
  note.textContent = `Filtered: ${runs} of ${data.runs.length} runs`;
}
