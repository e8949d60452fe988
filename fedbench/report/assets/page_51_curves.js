// MA, BA, TPR and TNR over rounds, one line per defense.

/** Go to the curves of a row of the table and highlight its defense. */
function showCurves(row) {
  sweptNames.forEach((name) => choose(`curves.${name}`, labelOf(row, name)));
  choose("curves.defense", defenseLabels[row.defense]);
  update("curves");
  goTo("curves");
}

/** Mean, minimum and maximum over the runs that have a value, for each round with any. */
function bandOf(runs, key) {
  const found = new Map();
  for (const run of runs) {
    run.rounds.index.forEach((round, i) => {
      const value = run.rounds[key]?.[i];
      if (!isNumber(value)) return;
      if (!found.has(round)) found.set(round, []);
      found.get(round).push(100 * value);
    });
  }
  return [...found]
    .sort((a, b) => a[0] - b[0])
    .map(([round, values]) => ({
      round,
      n: values.length,
      mean: mean(values),
      low: Math.min(...values),
      high: Math.max(...values),
    }));
}

function lineTraces(defense, runs, key, axes, { first, faded }) {
  const band = bandOf(runs, key);
  const { label, dash, symbol } = data.defenses[defense];
  const color = colorOf(defense);
  const common = { type: "scatter", ...axes, legendgroup: label, name: esc(label) };
  const traces = [];
  if (!faded && band.some(({ n }) => n > 1)) {
    traces.push({
      ...common,
      mode: "lines",
      showlegend: false,
      hoverinfo: "skip",
      fill: "toself",
      fillcolor: fade(color, 0.16),
      line: { width: 0 },
      x: [...band.map((p) => p.round), ...band.map((p) => p.round).reverse()],
      y: [...band.map((p) => p.high), ...band.map((p) => p.low).reverse()],
    });
  }
  traces.push({
    ...common,
    mode: band.length < 40 ? "lines+markers" : "lines",
    showlegend: first,
    opacity: faded ? 0.3 : 1,
    x: band.map((p) => p.round),
    y: band.map((p) => p.mean),
    line: { color, dash, width: faded ? 1.5 : 2.2 },
    marker: { color, symbol, size: 5 },
    hoverinfo: "text",
    hovertext: band.map((p) =>
      hoverLines(
        `${label}, round ${p.round}`,
        `${metricOf(key).label} ${fixed(p.mean, 1)} % (mean of ${plural(p.n, "seed")})`,
        p.n > 1 ? `seeds from ${fixed(p.low, 1)} to ${fixed(p.high, 1)}` : "",
      ),
    ),
  });
  return traces;
}

function seedLines(defense, runs, key, axes, { first, faded }) {
  const { label, dash, symbol } = data.defenses[defense];
  const color = colorOf(defense);
  return runs.map((run, i) => {
    const points = run.rounds.index
      .map((round, at) => [round, run.rounds[key]?.[at]])
      .filter(([, value]) => isNumber(value));
    return {
      type: "scatter",
      ...axes,
      mode: points.length === 1 ? "markers" : "lines",
      legendgroup: label,
      name: esc(label),
      showlegend: first && i === 0,
      opacity: faded ? 0.2 : 0.85,
      marker: { color, symbol, size: 5 },
      x: points.map(([round]) => round),
      y: points.map(([, value]) => 100 * value),
      line: { color, dash, width: 1.3 },
      customdata: points.map(() => runIndex.get(run)),
      hoverinfo: "text",
      hovertext: points.map(([round, value]) =>
        hoverLines(
          `${label}, seed ${run.seed}, round ${round}`,
          `${metricOf(key).label} ${percent(value)} %`,
          run.id,
        ),
      ),
    };
  });
}

/** The attacked rounds of the runs shown, merged. */
function attackedSpans(runs) {
  const spans = runs
    .flatMap((run) => run.rounds.attacked ?? [])
    .map(([a, b]) => [a, b])
    .sort((a, b) => a[0] - b[0]);
  const merged = [];
  for (const span of spans) {
    const last = merged[merged.length - 1];
    if (last && span[0] <= last[1] + 1) last[1] = Math.max(last[1], span[1]);
    else merged.push(span);
  }
  return merged;
}

function panelTitle(text, cell) {
  return {
    text: esc(text),
    xref: "paper",
    yref: "paper",
    x: cell.x[0],
    y: cell.y[1],
    xanchor: "left",
    yanchor: "bottom",
    yshift: 3,
    showarrow: false,
    font: { size: 13, weight: 600, color: theme().text },
  };
}

function runButtons(runs) {
  return el(
    "p",
    { class: "run-links" },
    "Runs: ",
    runs.flatMap((run) => [
      el(
        "button",
        { type: "button", class: "link", onclick: () => openRun(runIndex.get(run)) },
        `seed ${run.seed}`,
      ),
      " ",
    ]),
  );
}

function curveNotes(groups, marked) {
  const notes = [];
  const all = groups.flatMap(([, runs]) => runs);
  const partial = all.filter((run) => run.status !== "finished");
  if (partial.length)
    notes.push(
      message(
        `Not finished: ${partial.map(runName).join("; ")}. Means of late rounds have fewer seeds.`,
      ),
    );
  const own = groups.find(([defense]) => defense === marked);
  if (own)
    notes.push(el("div", {}, el("strong", {}, defenseLabels[marked]), ". ", runButtons(own[1])));
  return notes;
}

section(
  "curves",
  (body) => {
    const rows = shownRows().filter((row) => row.runs.some((index) => data.runs[index].rounds));
    const pick = picker("curves", sweptNames, rows, labelOf, () => update("curves"));
    const groups = pick.items.map((row) => [
      row.defense,
      row.runs.map((index) => data.runs[index]).filter((run) => run.rounds),
    ]);
    const names = groups.map(([defense]) => defenseLabels[defense]);
    const marked = chosen("curves.defense", names, "");
    const set = (name) => (value) => {
      choose(name, value === true ? 1 : value === false ? null : value);
      update("curves");
    };
    const content = frame(body, [
      ...pick.controls,
      select("Highlight", [["", "no defense"], ...names], marked, set("curves.defense"), {
        "data-control": "curves-defense",
      }),
      checkbox("Single seeds", isOn("curves.seeds"), set("curves.seeds"), {
        "data-control": "curves-seeds",
      }),
    ]);
    if (!$(":scope > .figure", content))
      content.replaceChildren(el("div", { class: "figure" }), el("div", { class: "notes" }));
    const [box, notes] = content.children;
    if (!groups.length) {
      instead(box, message("No round has been recorded yet."));
      return notes.replaceChildren();
    }
    drawCurves(box, groups, defenseLabels.indexOf(marked), pick.current);
    return notes.replaceChildren(...curveNotes(groups, defenseLabels.indexOf(marked)));
  },
  { lazy: true },
);

function drawCurves(box, groups, marked, row) {
  const width = widthOf(box);
  const top =
    legendHeight(
      groups.map(([defense]) => defenseLabels[defense]),
      width,
    ) + 28;
  const { cells, height } = grid(4, width, { top });
  const runs = groups.flatMap(([, own]) => own);
  const spans = attackedSpans(runs);
  const inOrder = [...groups].sort(([a], [b]) => (a === marked) - (b === marked)); // the highlighted on top
  const traces = [];
  const layout = { height, margin: { l: 56, r: 12, t: top, b: 52 }, annotations: [], shapes: [] };
  layout.legend = {
    orientation: "h",
    x: 0,
    xanchor: "left",
    y: 1 + 26 / (height - top - 52),
    yanchor: "bottom",
  };
  CURVE_METRICS.forEach((key, i) => {
    const { x, y, suffix } = cells[i];
    const axes = { xaxis: `x${suffix}`, yaxis: `y${suffix}` };
    layout[`xaxis${suffix}`] = axis("round", {
      domain: x,
      anchor: `y${suffix}`,
      matches: i ? "x" : undefined,
      rangemode: "normal",
    });
    const place = { domain: y, anchor: `x${suffix}` };
    layout[`yaxis${suffix}`] =
      key === "MA"
        ? maAxis(
            runs.flatMap((run) => (run.rounds.MA ?? []).map((value) => scaled("MA", value))),
            place,
          )
        : metricAxis(key, place);
    layout[`yaxis${suffix}`].title.text = "%";
    layout.annotations.push(panelTitle(metricOf(key).label, cells[i]));
    spans.forEach(([a, b]) =>
      layout.shapes.push({
        type: "rect",
        layer: "below",
        xref: `x${suffix}`,
        yref: `y${suffix} domain`,
        x0: a - 0.5,
        x1: b + 0.5,
        y0: 0,
        y1: 1,
        fillcolor: theme().shade,
        line: { width: 0 },
      }),
    );
    const draw = isOn("curves.seeds") ? seedLines : lineTraces;
    inOrder.forEach(([defense, own]) =>
      traces.push(
        ...draw(defense, own, key, axes, {
          first: i === 0,
          faded: marked >= 0 && defense !== marked,
        }),
      ),
    );
    if (!runs.some((run) => run.rounds[key]?.some(isNumber)))
      layout.annotations.push(emptyNote(`No ${key} was recorded.`, cells[i]));
  });
  const setting = sweptNames.length ? settingText(row) : "";
  figure(box, "curves", `Curves of BA, MA, TPR and TNR over rounds. ${setting}`, traces, layout, {
    onPoint: (run) => openRun(run),
    caption: [
      setting,
      spans.length ? "" : "No round was attacked.",
      isOn("curves.seeds") ? "One line per seed; select a line to open its run." : "",
    ]
      .filter(Boolean)
      .join(". "),
  });
}

function emptyNote(text, { x, y }) {
  return {
    text: esc(text),
    xref: "paper",
    yref: "paper",
    x: (x[0] + x[1]) / 2,
    y: (y[0] + y[1]) / 2,
    showarrow: false,
    font: { size: 12, color: theme().muted },
  };
}
