// The data of the page, small DOM helpers and the number formats.
const data = JSON.parse(document.getElementById("data").textContent);
const MINUS = "−";
const HEAT_METRICS = [
  "BA",
  "MA",
  "TPR",
  "TNR",
  "AUC",
  "BA_cumulative",
  "MA_lost",
  "lifespan_50",
  "lifespan_10",
  "recovery",
];
const CURVE_METRICS = ["BA", "MA", "TPR", "TNR"];

const $ = (selector, root = document) => root.querySelector(selector);
const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

/** Make an element. Strings become text nodes, so no name from a run is ever parsed as HTML. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** Escape a text for plotly, which reads <b>, <a href> and entities in labels. */
function esc(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

/** A name that may break after its underscores. */
function breakable(text) {
  return String(text)
    .split(/(?<=_)/)
    .flatMap((part, i) => (i ? [el("wbr"), part] : [part]));
}

function fixed(value, digits) {
  return value
    .toFixed(digits)
    .replace(/^-(0(?:\.0*)?)$/, "$1")
    .replace("-", MINUS);
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
/** A rate in percent with one decimal; a dash if it is undefined. */
const percent = (value) => (isNumber(value) ? fixed(100 * value, 1) : "-");

function shortNumber(value) {
  if (!isNumber(value)) return "-";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2).replace("-", MINUS);
  return String(Number(value.toPrecision(3))).replace("-", MINUS);
}

const metrics = new Map(data.metrics.map((metric) => [metric.key, metric]));
const metricOf = (key) =>
  metrics.get(key) ?? {
    key,
    label: key,
    help: "",
    percent: true,
    unit: "%",
    lower_is_better: key === "BA",
  };
const heatMetrics = data.metrics
  .map((metric) => metric.key)
  .filter((key) => HEAT_METRICS.includes(key) || key.startsWith("BA/"));

const formatMetric = (key, value) => (metricOf(key).percent ? percent(value) : shortNumber(value));
const unitOf = (key) => metricOf(key).unit;
/** Mark a lower bound: the run ended before the event. */
const atLeast = (censored) => (censored ? "≥ " : "");
const withUnit = (key) =>
  unitOf(key) ? `${metricOf(key).label} (${unitOf(key)})` : metricOf(key).label;
const scaled = (key, value) =>
  isNumber(value) ? (metricOf(key).percent ? 100 * value : value) : null;

function interval(key, low, high) {
  return isNumber(low) && isNumber(high)
    ? `[${formatMetric(key, low)}, ${formatMetric(key, high)}]`
    : "";
}

const plural = (n, one, many = `${one}s`) => `${n} ${n === 1 ? one : many}`;
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const unique = (values) => [...new Set(values)];

function pValue(p) {
  if (!isNumber(p)) return "-";
  return p < 0.001 ? "< 0.001" : p.toFixed(3);
}

// ---- settings of rows and runs

const defenseLabels = data.defenses.map((defense) => defense.label);
const sweptNames = data.swept.map((key) => key.name);
const sweptByName = new Map(data.swept.map((key) => [key.name, key]));
const axisNames = ["defense", ...sweptNames];

/** Label of a row for `defense` or a key of the table. */
function labelOf(row, name) {
  return name === "defense" ? defenseLabels[row.defense] : row.setting[data.keys.indexOf(name)];
}

/** All labels of an axis, in the order of the table. */
function labelsOf(name) {
  if (name === "defense") return defenseLabels;
  return sweptByName.get(name)?.labels ?? unique(data.rows.map((row) => labelOf(row, name)));
}

/** Name a value in running text: `pmr=0.2`, but `dba` alone for the attack. */
const nameValue = (name, label) =>
  name === "attack" || name === "defense" || name === "dataset" ? label : `${name}=${label}`;

function settingText(row, names = sweptNames) {
  return names.map((name) => nameValue(name, labelOf(row, name))).join(", ");
}

const rowOfRun = (run) => (run.row >= 0 ? data.rows[run.row] : null);
const runIndex = new Map(data.runs.map((run, index) => [run, index]));
const statOf = (row, key) => row.stats?.[key] ?? null;

function runName(run) {
  const row = rowOfRun(run);
  return row
    ? [defenseLabels[row.defense], settingText(row), `seed ${run.seed}`].filter(Boolean).join(", ")
    : run.title;
}

/** The run of a row with a seed. */
const runOfSeed = (row, seed) => row.runs.find((index) => data.runs[index].seed === seed);

const splitText = (stat) => `${stat.above}/${stat.n} seeds above 50`;
