// The heat map: an HTML table, so that each number can be read, selected and reached by keyboard.

// Cividis (Nunez, Anderton and Renslow, 2018) at 0, 1/16, ..., 1: even steps for any color vision.
const CIVIDIS = [
  "#00224e",
  "#002e6a",
  "#1a386f",
  "#32436d",
  "#434e6c",
  "#535a6d",
  "#61656f",
  "#6f7073",
  "#7d7c78",
  "#8b8778",
  "#9a9376",
  "#aaa073",
  "#bbad6d",
  "#ccba64",
  "#ddc858",
  "#efd748",
  "#fee838",
];

function cividis(share) {
  const at = Math.min(1, Math.max(0, share)) * (CIVIDIS.length - 1);
  const low = Math.min(Math.floor(at), CIVIDIS.length - 2);
  return mix(CIVIDIS[low], CIVIDIS[low + 1], at - low);
}

/** The value at the end of the colors: 1 for rates, otherwise the largest mean of the page. */
function heatEnd(key) {
  if (metricOf(key).percent) return 1;
  return Math.max(1, ...data.rows.map((row) => statOf(row, key)?.mean ?? 0));
}

/** Good values are light and bad ones dark, for every metric. */
function heatColor(key, value) {
  const share = value / heatEnd(key);
  const back = cividis(metricOf(key).lower_is_better ? 1 - share : share);
  return {
    back,
    text: contrast(back, "#ffffff") >= contrast(back, "#000000") ? "#ffffff" : "#000000",
  };
}

const OVER = [
  ["*mean", "mean over all"],
  ["*worst", "worst over all"],
];

/** The value with the most rows is the default, so that the map is as full as can be. */
function fullest(name, rows) {
  const count = (label) => rows.filter((row) => labelOf(row, name) === label).length;
  return labelsOf(name)
    .filter((label) => passes(name, label))
    .reduce((best, label) => (best === null || count(label) > count(best) ? label : best), null);
}

function heatChoice() {
  const rows = shownRows();
  const metric = chosen("heat.metric", heatMetrics);
  const by = { rows: data.by?.rows ?? "defense", columns: data.by?.columns ?? axisNames[1] };
  const down = chosen("heat.rows", axisNames, axisNames.includes(by.rows) ? by.rows : "defense");
  const others = axisNames.filter((name) => name !== down);
  const across = chosen(
    "heat.columns",
    others,
    others.includes(by.columns) ? by.columns : (others[0] ?? null),
  );
  const rest = axisNames
    .filter((name) => name !== down && name !== across)
    .filter((name) => unique(rows.map((row) => labelOf(row, name))).length > 1)
    .map((name) => {
      const options = labelsOf(name).filter((label) => passes(name, label));
      return {
        name,
        options,
        value: chosen(`heat.at.${name}`, [...options, "*mean", "*worst"], fullest(name, rows)),
      };
    });
  return { rows, metric, down, across, rest };
}

/** Rows of the table behind a cell, and the number it shows. */
function heatCell({ rows, metric, down, across, rest }, rowLabel, columnLabel) {
  const found = rows.filter(
    (row) =>
      labelOf(row, down) === rowLabel &&
      (across === null || labelOf(row, across) === columnLabel) &&
      rest.every(({ name, value }) => value.startsWith("*") || labelOf(row, name) === value),
  );
  const measured = found.filter((row) => statOf(row, metric));
  if (!measured.length) return { found, measured, value: null };
  const value = (row) => statOf(row, metric).mean;
  const lower = metricOf(metric).lower_is_better;
  const worst = measured.reduce((a, b) =>
    value(b) > value(a) === lower && value(b) !== value(a) ? b : a,
  );
  const isWorst = rest.some((key) => key.value === "*worst");
  return {
    found,
    measured,
    row: worst,
    censored: (isWorst ? [worst] : measured).some((row) => statOf(row, metric).censored),
    value: isWorst || measured.length === 1 ? value(worst) : mean(measured.map(value)),
  };
}

function heatNote(metric, cell) {
  if (cell.measured.length > 1) return `${cell.measured.length} settings`;
  const stat = statOf(cell.row, metric);
  return metric === "BA" && stat.split ? splitText(stat) : `n=${stat.n}`;
}

function heatTitle(choice, cell, rowLabel, columnLabel) {
  const { metric } = choice;
  const start = `${[rowLabel, columnLabel].filter(Boolean).join(", ")}: ${metricOf(metric).label} ${atLeast(cell.censored)}${formatMetric(metric, cell.value)}`;
  if (cell.measured.length > 1) return `${start}, over ${cell.measured.length} settings`;
  const stat = statOf(cell.row, metric);
  const range = interval(metric, stat.low, stat.high);
  return [
    start,
    range && `95 % interval ${range}`,
    plural(stat.n, "seed"),
    `worst seed ${formatMetric(metric, stat.worst[1])}`,
    metric === "BA" && stat.split ? splitText(stat) : "",
  ]
    .filter(Boolean)
    .join(", ");
}

function emptyCell(found, metric) {
  if (!found.length) return ["-", "not run"];
  const bad = found.find((row) => row.status !== "finished");
  return bad ? ["-", bad.status] : ["-", `no ${metricOf(metric).label}`];
}

function heatTd(choice, rowLabel, columnLabel) {
  const cell = heatCell(choice, rowLabel, columnLabel);
  const { metric, down, across } = choice;
  const defense = down === "defense" ? rowLabel : across === "defense" ? columnLabel : null;
  const marks = {
    "data-row": rowLabel,
    "data-column": columnLabel,
    "data-defense": defense,
    "data-metric": metric,
  };
  if (cell.value === null) {
    const [text, why] = emptyCell(cell.found, metric);
    return el(
      "td",
      { ...marks, "data-value": "", class: "empty" },
      el("span", { class: "number" }, text),
      el("small", {}, why),
    );
  }
  const { back, text } = heatColor(metric, cell.value);
  const title = heatTitle(choice, cell, rowLabel, columnLabel);
  const split = metric === "BA" && cell.measured.length === 1 && statOf(cell.row, metric).split;
  const button = el(
    "button",
    {
      type: "button",
      title,
      "aria-label": `${title}. Show the curves`,
      style: `background:${back};color:${text}`,
      class: split ? "split" : null,
      onclick: () => showCurves(cell.row),
    },
    el("span", { class: "number" }, atLeast(cell.censored) + formatMetric(metric, cell.value)),
    el("small", {}, heatNote(metric, cell)),
  );
  return el("td", { ...marks, "data-value": cell.value }, button);
}

function heatLegend(metric) {
  const lower = metricOf(metric).lower_is_better;
  const highest = heatEnd(metric);
  const stops = Array.from({ length: 17 }, (_, i) => heatColor(metric, (highest * i) / 16).back);
  const end = (value) => `${shortNumber(scaled(metric, value))} ${unitOf(metric)}`;
  return el(
    "div",
    {
      class: "legend",
      role: "img",
      "aria-label": `Colors from ${end(0)} to ${end(highest)}; ${lower ? "low" : "high"} values are good and light`,
    },
    el("span", {}, `${end(0)} ${lower ? "(good)" : "(bad)"}`),
    el("span", { class: "ramp", style: `background:linear-gradient(to right,${stops.join(",")})` }),
    el("span", {}, `${end(highest)} ${lower ? "(bad)" : "(good)"}`),
  );
}

function heatTable(choice) {
  const { rows, metric, down, across, rest } = choice;
  const keep = (name) => {
    const found = new Set(rows.map((row) => labelOf(row, name)));
    return labelsOf(name).filter((label) => found.has(label));
  };
  const columns = across === null ? [metricOf(metric).label] : keep(across);
  const where = rest.map(({ name, value }) =>
    value.startsWith("*") ? `${value.slice(1)} over ${name}` : nameValue(name, value),
  );
  const caption = [
    `${metricOf(metric).label} in ${unitOf(metric)}, ${metricOf(metric).help || "mean over seeds"}`,
    ...where,
  ].join("; ");
  return [
    el("p", { class: "note", id: "heat-caption" }, caption),
    el(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "Heat map" },
      el(
        "table",
        { class: "heat", "aria-describedby": "heat-caption" },
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            el("th", { scope: "col", class: "corner" }, down),
            columns.map((label) =>
              el(
                "th",
                { scope: "col" },
                breakable(across === null ? label : nameValue(across, label)),
              ),
            ),
          ),
        ),
        el(
          "tbody",
          {},
          keep(down).map((rowLabel) =>
            el(
              "tr",
              {},
              el("th", { scope: "row" }, breakable(nameValue(down, rowLabel))),
              columns.map((label) => heatTd(choice, rowLabel, across === null ? "" : label)),
            ),
          ),
        ),
      ),
    ),
  ];
}

section("heatmap", (body) => {
  const choice = heatChoice();
  const set = (name) => (value) => {
    choose(name, value);
    update("heatmap");
  };
  const others = axisNames.filter((name) => name !== choice.down);
  const content = frame(body, [
    select(
      "Metric",
      heatMetrics.map((key) => [key, metricOf(key).label]),
      choice.metric,
      set("heat.metric"),
      { "data-control": "heat-metric" },
    ),
    ...(axisNames.length > 1
      ? [
          select("Rows", axisNames, choice.down, set("heat.rows"), { "data-control": "heat-rows" }),
          select("Columns", others, choice.across, set("heat.columns"), {
            "data-control": "heat-columns",
          }),
        ]
      : []),
    ...choice.rest.map(({ name, options, value }) =>
      select(name, [...options, ...OVER], value, set(`heat.at.${name}`), {
        "data-control": `heat-at-${name}`,
      }),
    ),
  ]);
  content.replaceChildren(
    ...(choice.rows.length && choice.metric
      ? [...heatTable(choice), heatLegend(choice.metric)]
      : [message("No run passes the filters.")]),
  );
});
