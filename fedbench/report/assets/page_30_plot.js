// Plotly with the page's colors, for the screen (light or dark) and for print.
const MALICIOUS = { color: "#D55E00", symbol: "triangle-up" };
const BENIGN = { color: "#0072B2", symbol: "circle" };
const PRINT_WIDTH = 690; // CSS pixels between the margins of an A4 page
const darkQuery = matchMedia("(prefers-color-scheme: dark)");
let printing = false;

const isDark = () => darkQuery.matches && !printing;

function theme() {
  return isDark()
    ? {
        text: "#e4e6ea",
        muted: "#a9b0ba",
        grid: "#363c46",
        axis: "#6b7482",
        back: "#15181d",
        shade: "rgba(255,255,255,0.07)",
      }
    : {
        text: "#1d2129",
        muted: "#555d69",
        grid: "#e3e6ea",
        axis: "#8a929e",
        back: "#ffffff",
        shade: "rgba(40,50,70,0.07)",
      };
}

function luminance(hex) {
  const parts = [1, 3, 5]
    .map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
}

const contrast = (a, b) => {
  const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
};

function mix(hex, other, share) {
  const part = (i) =>
    Math.round(
      parseInt(hex.slice(i, i + 2), 16) * (1 - share) + parseInt(other.slice(i, i + 2), 16) * share,
    );
  return `#${[1, 3, 5].map((i) => part(i).toString(16).padStart(2, "0")).join("")}`;
}

/** The color of a mark; dark colors are lightened on a dark page until they can be seen. */
function visible(hex) {
  if (!isDark()) return hex;
  let color = hex;
  for (let step = 1; contrast(color, theme().back) < 4 && step <= 9; step += 1)
    color = mix(hex, "#ffffff", step / 10);
  return color;
}

function fade(hex, alpha) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  return `rgba(${r},${g},${b},${alpha})`;
}

const colorOf = (defense) => visible(data.defenses[defense].color);

function axis(title, extra = {}) {
  const { grid, axis: line, text } = theme();
  return {
    title: { text: title, standoff: 8, font: { size: 13, color: text } },
    gridcolor: grid,
    linecolor: line,
    tickcolor: line,
    zeroline: false,
    showline: true,
    ticks: "outside",
    ticklen: 4,
    tickfont: { size: 12, color: text },
    automargin: true,
    exponentformat: "power",
    ...extra,
  };
}

/** An axis of a metric: rates have the same range everywhere, with room for marks at the ends. */
const metricAxis = (key, extra = {}) =>
  axis(withUnit(key), metricOf(key).percent ? { range: [-3, 103], dtick: 25, ...extra } : extra);

/** MA differs by little between defenses, so its axis covers the values shown, and at least 20 points. */
function maAxis(values, extra = {}) {
  const numbers = values.filter(isNumber);
  if (!numbers.length) return metricAxis("MA", extra);
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const pad = Math.max(2, (20 - (high - low)) / 2);
  return metricAxis("MA", {
    range: [Math.max(-3, low - pad), Math.min(103, high + pad)],
    dtick: undefined,
    nticks: 6,
    ...extra,
  });
}

/** An axis with a label per position 0, 1, 2, ... */
const labelAxis = (title, labels, extra = {}) =>
  axis(title, {
    tickmode: "array",
    tickvals: labels.map((_, i) => i),
    ticktext: labels.map((label) => esc(shorten(label))),
    range: [-0.5, labels.length - 0.5],
    ...extra,
  });

const shorten = (text, length = 26) =>
  text.length > length ? `${text.slice(0, length - 1)}…` : text;

function layoutOf(extra) {
  const { text, back, muted } = theme();
  return {
    paper_bgcolor: back,
    plot_bgcolor: back,
    hovermode: "closest",
    dragmode: false,
    showlegend: true,
    font: {
      family: 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif',
      size: 12,
      color: text,
    },
    margin: { l: 56, r: 16, t: 40, b: 48 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: muted, activecolor: text },
    hoverlabel: {
      bgcolor: back,
      bordercolor: muted,
      align: "left",
      namelength: -1,
      font: { color: text, size: 12 },
    },
    legend: {
      orientation: "h",
      x: 0,
      xanchor: "left",
      y: 1.02,
      yanchor: "bottom",
      font: { size: 12, color: text },
      tracegroupgap: 4,
    },
    ...extra,
  };
}

/** Run plotly's code when the first figure needs it: it takes longer than the rest of the page. */
function loadPlotly() {
  const source = document.getElementById("plotly");
  if (!source) return;
  document.head.append(el("script", {}, source.textContent));
  source.remove();
}

/** Width that a figure may fill. */
function widthOf(node) {
  return printing ? PRINT_WIDTH : node.clientWidth || Math.min(innerWidth - 32, 1150);
}

/**
 * Draw a figure into a box with a caption and a button that saves it as SVG. `onPoint` gets the
 * customdata of a clicked mark.
 */
function figure(box, name, label, traces, layout, { onPoint = null, caption = "" } = {}) {
  loadPlotly();
  let plot = $(":scope > .plot", box);
  if (!plot) {
    plot = el("div", { class: "plot", role: "img", "data-figure": name });
    box.replaceChildren(
      plot,
      el(
        "div",
        { class: "figure-foot" },
        el("p", { class: "figcaption" }),
        el(
          "button",
          { type: "button", class: "small", onclick: () => saveFigure(plot, name) },
          "Save as SVG",
        ),
      ),
    );
  }
  plot.setAttribute("aria-label", label);
  $(".figcaption", box).textContent = caption;
  const width = widthOf(box);
  const size = { ...layout, width, autosize: false };
  plot.style.minHeight = `${layout.height}px`;
  Plotly.react(plot, traces, layoutOf(size), {
    displaylogo: false,
    responsive: false,
    doubleClick: "reset",
    showTips: false,
    modeBarButtonsToRemove: ["toImage", "select2d", "lasso2d", "autoScale2d", "sendDataToCloud"],
    displayModeBar: matchMedia("(hover: hover)").matches ? "hover" : false,
  });
  plot.removeAllListeners("plotly_click");
  if (onPoint) {
    plot.on("plotly_click", ({ points }) => {
      const point = points.find(
        ({ customdata }) => customdata !== undefined && customdata !== null,
      );
      if (point) onPoint(point.customdata, point);
    });
  }
  return plot;
}

function saveFigure(plot, name) {
  const { width, height } = plot.getBoundingClientRect();
  Plotly.downloadImage(plot, {
    format: "svg",
    filename: `fedbench_${name}`,
    width: Math.round(width),
    height: Math.round(height),
  });
}

/** Remove a figure and put something else into its box. */
function instead(box, ...nodes) {
  const plot = $(":scope > .plot", box);
  if (plot) Plotly.purge(plot);
  box.replaceChildren(...nodes);
}

/** Positions of small multiples: two columns, or one on a narrow page. */
function grid(n, width, { rowHeight = 250, gapX = 0.09, gapPixels = 76, top = 60 } = {}) {
  const columns = width < 620 ? 1 : Math.min(2, n);
  const rows = Math.ceil(n / columns);
  const inner = rows * rowHeight + (rows - 1) * gapPixels;
  const gapY = (rows > 1 ? gapPixels : 0) / inner;
  const [w, h] = [(1 - gapX * (columns - 1)) / columns, (1 - gapY * (rows - 1)) / rows];
  const cells = Array.from({ length: n }, (_, i) => {
    const [column, row] = [i % columns, Math.floor(i / columns)];
    const left = column * (w + gapX);
    const upper = 1 - row * (h + gapY);
    return {
      x: [left, Math.min(1, left + w)],
      y: [Math.max(0, upper - h), upper],
      suffix: i ? String(i + 1) : "",
    };
  });
  return { cells, height: inner + top + 52 };
}

/** Space that a horizontal legend above the figure needs. */
function legendHeight(labels, width) {
  let [lines, used] = [1, 0];
  const widest = Math.max(...labels.map((label) => label.length), 1) * 7 + 48;
  labels.forEach(() => {
    if (used + widest > width - 70 && used) [lines, used] = [lines + 1, 0];
    used += widest;
  });
  return lines * 20 + 16;
}

function redrawFigures() {
  sections.forEach((entry) => {
    if (entry.lazy && !entry.dirty) update(entry.id);
  });
}

function watchTheme() {
  darkQuery.addEventListener("change", () => updateAll());
  let [timer, lastWidth] = [0, innerWidth];
  addEventListener("resize", () => {
    if (innerWidth === lastWidth) return; // phones resize when the address bar hides
    lastWidth = innerWidth;
    clearTimeout(timer);
    timer = setTimeout(redrawFigures, 120);
  });
  addEventListener("beforeprint", () => {
    printing = true;
    sections.forEach((entry) => render(entry));
  });
  addEventListener("afterprint", () => {
    printing = false;
    updateAll();
  });
}
