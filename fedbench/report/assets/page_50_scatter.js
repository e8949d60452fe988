// BA against MA with the Pareto front of the means.

/** Points that no other point beats in both: by falling MA, each with a lower BA than the last. */
function paretoFront(points) {
  const sorted = [...points].sort((a, b) => b.ma - a.ma || a.ba - b.ba);
  const front = [];
  for (const point of sorted) {
    if (!front.length || point.ba < front[front.length - 1].ba) front.push(point);
  }
  return front;
}

function scatterPoints(rows) {
  return rows
    .filter((row) => statOf(row, "BA") && statOf(row, "MA"))
    .map((row) => ({
      row,
      ba: statOf(row, "BA").mean,
      ma: statOf(row, "MA").mean,
      seeds: row.runs
        .map((index) => data.runs[index])
        .filter(
          (run) =>
            run.status === "finished" && isNumber(run.metrics?.BA) && isNumber(run.metrics?.MA),
        ),
    }));
}

const hoverLines = (...lines) => lines.filter(Boolean).map(esc).join("<br>");

function seedTrace(defense, points) {
  const runs = points.flatMap((point) => point.seeds);
  const { label, symbol } = data.defenses[defense];
  return {
    type: "scatter",
    mode: "markers",
    legendgroup: label,
    showlegend: false,
    name: esc(label),
    x: runs.map((run) => scaled("MA", run.metrics.MA)),
    y: runs.map((run) => scaled("BA", run.metrics.BA)),
    marker: { color: fade(colorOf(defense), 0.55), symbol, size: 7 },
    customdata: runs.map((run) => runIndex.get(run)),
    hoverinfo: "text",
    hovertext: runs.map((run) =>
      hoverLines(
        runName(run),
        `MA ${percent(run.metrics.MA)} %, BA ${percent(run.metrics.BA)} %`,
        run.id,
      ),
    ),
  };
}

function meanTrace(defense, points) {
  const { label, symbol } = data.defenses[defense];
  return {
    type: "scatter",
    mode: "markers",
    legendgroup: label,
    name: esc(label),
    x: points.map((point) => 100 * point.ma),
    y: points.map((point) => 100 * point.ba),
    marker: {
      color: colorOf(defense),
      symbol,
      size: 15,
      line: { color: theme().text, width: 1.5 },
    },
    hoverinfo: "text",
    hovertext: points.map(({ row, ma, ba, seeds }) =>
      hoverLines(
        `${label}: mean of ${plural(seeds.length, "seed")}`,
        settingText(row),
        `MA ${percent(ma)} %, BA ${percent(ba)} %`,
        statOf(row, "BA").split ? `BA: ${splitText(statOf(row, "BA"))}` : "",
      ),
    ),
  };
}

/** The border of the region that the front dominates, as a step line out to the axes. */
function frontTrace(front, [left]) {
  const [x, y] = [[], []];
  front.forEach((point, i) => {
    const next = front[i + 1];
    x.push(100 * point.ma, next ? 100 * next.ma : left);
    y.push(100 * point.ba, 100 * point.ba);
  });
  return {
    type: "scatter",
    mode: "lines",
    x,
    y,
    name: "Pareto front of the means",
    hoverinfo: "skip",
    line: { color: theme().muted, width: 1.5, dash: "dot" },
  };
}

function maRange(points) {
  const values = points.flatMap((point) => point.seeds.map((run) => 100 * run.metrics.MA));
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const pad = Math.max(1, (high - low) * 0.08);
  return [Math.max(-2, low - pad), Math.min(102, high + pad)];
}

section(
  "scatter",
  (body) => {
    const pick = picker("scatter", sweptNames, shownRows(), labelOf, () => update("scatter"), {
      all: sweptNames,
    });
    const content = frame(body, pick.controls);
    const points = scatterPoints(pick.items).filter((point) => point.seeds.length);
    if (!points.length)
      return instead(content, message("No finished run has both BA and MA here."));
    const byDefense = shownDefenses()
      .map((defense) => [defense, points.filter(({ row }) => row.defense === defense)])
      .filter(([, own]) => own.length);
    const range = maRange(points);
    const front = pick.isOne ? paretoFront(points) : [];
    const width = widthOf(content);
    const labels = [
      ...byDefense.map(([defense]) => defenseLabels[defense]),
      ...(front.length ? ["Pareto front of the means"] : []),
    ];
    const top = legendHeight(labels, width) + 12;
    const names = front.map(({ row }) => defenseLabels[row.defense]);
    const setting = pick.isOne && sweptNames.length ? settingText(points[0].row) : "";
    figure(
      content,
      "scatter",
      `Scatter of BA against MA. ${front.length ? `Pareto front: ${names.join(", ")}.` : ""}`,
      [
        ...(front.length ? [frontTrace(front, range)] : []),
        ...byDefense.map(([defense, own]) => seedTrace(defense, own)),
        ...byDefense.map(([defense, own]) => meanTrace(defense, own)),
      ],
      {
        height: 430 + top,
        margin: { l: 60, r: 16, t: top, b: 52 },
        xaxis: axis(withUnit("MA"), { range }),
        yaxis: metricAxis("BA"),
      },
      {
        onPoint: (run) => openRun(run),
        caption: front.length
          ? `${setting ? `${setting}. ` : ""}On the Pareto front: ${names.join(", ")}. No other defense has a lower mean BA together with a higher mean MA.`
          : "Several settings at once. The Pareto front is drawn when one setting is chosen, since BA under different settings is not comparable.",
      },
    );
    return undefined;
  },
  { lazy: true },
);
