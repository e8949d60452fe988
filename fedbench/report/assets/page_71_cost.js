// Seconds per round of training and of aggregation.
const COSTS = [
  ["aggregate", "Aggregation"],
  ["train", "Training"],
];

/** Seconds per round of each run shown, by defense. */
function costPoints(part) {
  return shownDefenses()
    .map((defense) => ({
      defense,
      points: shownRuns()
        .filter(
          (run) =>
            run.row >= 0 && data.rows[run.row].defense === defense && run.status === "finished",
        )
        .map((run) => ({ run, value: run.seconds?.[part] / run.rounds?.index?.length }))
        .filter(({ value }) => isNumber(value)),
    }))
    .filter(({ points }) => points.length);
}

function costTraces(groups, order, axes, log) {
  const at = ({ defense }) => order.indexOf(defense);
  const average = (group) => mean(group.points.map((point) => point.value));
  const hover = groups.map((group) =>
    hoverLines(
      defenseLabels[group.defense],
      `mean of ${plural(group.points.length, "run")}: ${shortNumber(average(group))} s per round`,
    ),
  );
  const look = { color: groups.map(({ defense }) => colorOf(defense)) };
  const means = log
    ? {
        type: "scatter",
        mode: "markers",
        marker: { ...look, symbol: "line-ns-open", size: 22, line: { width: 3 } },
      }
    : {
        type: "bar",
        orientation: "h",
        width: 0.62,
        marker: { color: groups.map(({ defense }) => fade(colorOf(defense), 0.55)) },
      };
  return [
    {
      ...means,
      ...axes,
      x: groups.map(average),
      y: groups.map(at),
      hoverinfo: "text",
      hovertext: hover,
    },
    ...groups.map((group) => ({
      type: "scatter",
      mode: "markers",
      ...axes,
      x: group.points.map((p) => p.value),
      y: group.points.map((_, i) => at(group) + jitter(i)),
      marker: {
        color: colorOf(group.defense),
        size: 5,
        symbol: data.defenses[group.defense].symbol,
        opacity: 0.8,
      },
      customdata: group.points.map(({ run }) => runIndex.get(run)),
      hoverinfo: "text",
      hovertext: group.points.map(({ run, value }) =>
        hoverLines(runName(run), `${shortNumber(value)} s per round`),
      ),
    })),
  ];
}

/** Spread marks over the bar in a fixed pattern. */
const jitter = (i) => (((i * 0.618034) % 1) - 0.5) * 0.44;

section(
  "cost",
  (body) => {
    const parts = COSTS.map(([key, name]) => ({ name, groups: costPoints(key) }));
    const values = parts.flatMap(({ groups }) =>
      groups.flatMap(({ points }) => points.map((point) => point.value)),
    );
    const canLog = values.length > 0 && values.every((value) => value > 0);
    const log = canLog && isOn("cost.log");
    const content = frame(
      body,
      canLog
        ? [
            checkbox(
              "Log scale",
              log,
              (on) => {
                choose("cost.log", on ? 1 : null);
                update("cost");
              },
              { "data-control": "cost-log" },
            ),
          ]
        : [],
    );
    if (!values.length)
      return instead(content, message("No finished run has recorded its seconds."));
    const order = shownDefenses().filter((defense) =>
      parts.some(({ groups }) => groups.some((group) => group.defense === defense)),
    );
    const width = widthOf(content);
    const { cells, height } = grid(2, width, {
      rowHeight: order.length * 34 + 20,
      top: 34,
      gapX: 0.18,
    });
    const labels = order.map((defense) => shorten(defenseLabels[defense], 20));
    const layout = {
      height,
      showlegend: false,
      annotations: [],
      margin: { l: 60, r: 24, t: 34, b: 52 },
      bargap: 0.3,
    };
    const traces = parts.flatMap(({ name, groups }, i) => {
      const { x, y, suffix } = cells[i];
      const most = Math.max(
        ...groups.flatMap(({ points }) => points.map((point) => point.value)),
        0,
      );
      layout[`xaxis${suffix}`] = axis("seconds per round", {
        domain: x,
        anchor: `y${suffix}`,
        ...(log
          ? {
              type: "log",
              ...logTicks(groups.flatMap(({ points }) => points.map((point) => point.value))),
            }
          : { nticks: 6, range: [0, most * 1.06 || 1] }),
      });
      layout[`yaxis${suffix}`] = {
        ...labelAxis("", labels, { domain: y, anchor: `x${suffix}`, showgrid: false }),
        range: [order.length - 0.5, -0.5],
      };
      layout.annotations.push(panelTitle(name, cells[i]));
      return costTraces(groups, order, { xaxis: `x${suffix}`, yaxis: `y${suffix}` }, log);
    });
    figure(
      content,
      "cost",
      "Seconds of aggregation and training per round by defense",
      traces,
      layout,
      {
        onPoint: (run) => openRun(run),
        caption: log
          ? "Vertical strokes are means."
          : "The two panels have different scales. Runs that share a processor slow each other down; compare defenses, not machines.",
      },
    );
    return undefined;
  },
  { lazy: true },
);
