// BA, MA, TPR and TNR over the values of one swept setting.

/** Sideways offset of a defense, so that intervals at the same value do not hide each other. */
function dodge(rank, n, gap) {
  return n > 1 ? (rank / (n - 1) - 0.5) * gap * Math.min(0.4, 0.05 * n) : 0;
}

function effectTraces(defense, rows, key, axes, place, { first, lines }) {
  const { label, symbol, dash } = data.defenses[defense];
  const color = colorOf(defense);
  const own = rows
    .filter((row) => row.defense === defense && statOf(row, key))
    .map((row) => ({ row, stat: statOf(row, key), x: place(row) }))
    .sort((a, b) => a.x - b.x);
  const reach = (bound, point) =>
    isNumber(point.stat[bound]) ? Math.abs(100 * (point.stat[bound] - point.stat.mean)) : 0;
  const seeds = own.flatMap(({ row, stat, x }) =>
    stat.values.map(([seed, value]) => ({ row, seed, value, x })),
  );
  const common = { type: "scatter", ...axes, legendgroup: label, name: esc(label) };
  return [
    {
      ...common,
      mode: "markers",
      showlegend: false,
      x: seeds.map((p) => p.x),
      y: seeds.map((p) => 100 * p.value),
      marker: { color: fade(color, 0.45), symbol, size: 4.5 },
      customdata: seeds.map((p) => runOfSeed(p.row, p.seed)),
      hoverinfo: "text",
      hovertext: seeds.map((p) =>
        hoverLines(
          `${label}, ${settingText(p.row)}, seed ${p.seed}`,
          `${key} ${percent(p.value)} %`,
        ),
      ),
    },
    {
      ...common,
      mode: lines ? "lines+markers" : "markers",
      showlegend: first,
      x: own.map((p) => p.x),
      y: own.map((p) => 100 * p.stat.mean),
      line: { color, dash, width: 2 },
      marker: { color, symbol, size: 9 },
      hoverinfo: "text",
      error_y: {
        type: "data",
        symmetric: false,
        array: own.map((p) => reach("high", p)),
        arrayminus: own.map((p) => reach("low", p)),
        color,
        thickness: 1.3,
        width: 3,
      },
      hovertext: own.map(({ row, stat }) =>
        hoverLines(
          `${label}, ${settingText(row)}`,
          `${key} ${percent(stat.mean)} % (mean of ${plural(stat.n, "seed")})`,
          isNumber(stat.low) ? `95 % interval ${interval(key, stat.low, stat.high)}` : "",
          key === "BA" && stat.split ? splitText(stat) : "",
        ),
      ),
    },
  ];
}

/** Positions of a key's values: the numbers themselves, or 0, 1, 2, ... for names. */
function effectScale(key, rows, defenses) {
  const swept = sweptByName.get(key);
  const labels = swept.labels.filter((label) => rows.some((row) => labelOf(row, key) === label));
  const numeric = swept.numeric;
  const at = (label) =>
    numeric ? Number(swept.values[swept.labels.indexOf(label)]) : labels.indexOf(label);
  const values = labels.map(at).sort((a, b) => a - b);
  const gap =
    values.length > 1 ? Math.min(...values.slice(1).map((value, i) => value - values[i])) : 1;
  const place = (row) =>
    at(labelOf(row, key)) + dodge(defenses.indexOf(row.defense), defenses.length, gap);
  const ticks = {
    tickmode: "array",
    tickvals: labels.map(at),
    ticktext: labels.map((label) => esc(shorten(label))),
    range: [values[0] - 0.5 * gap, values[values.length - 1] + 0.5 * gap],
  };
  return { numeric, place, ticks };
}

section(
  "effect",
  (body) => {
    if (!sweptNames.length)
      return instead(
        body,
        message(
          "Only the defense differs between these runs. Sweep a setting, such as pmr=0.2,0.3,0.4, to see its effect.",
        ),
      );
    const preferred = data.swept.find((key) => key.numeric)?.name ?? sweptNames[0];
    const key = chosen("effect.key", sweptNames, preferred);
    const others = sweptNames.filter((name) => name !== key);
    const pick = picker("effect", others, shownRows(), labelOf, () => update("effect"));
    const content = frame(body, [
      select(
        "Setting",
        sweptNames,
        key,
        (value) => {
          choose("effect.key", value);
          update("effect");
        },
        { "data-control": "effect-key" },
      ),
      ...pick.controls,
    ]);
    const rows = pick.items.filter((row) => CURVE_METRICS.some((metric) => statOf(row, metric)));
    if (!rows.length) return instead(content, message("No finished run passes the filters."));
    return drawEffect(content, key, rows, others);
  },
  { lazy: true },
);

function drawEffect(content, key, rows, others) {
  const defenses = shownDefenses().filter((defense) => rows.some((row) => row.defense === defense));
  const { numeric, place, ticks } = effectScale(key, rows, defenses);
  const width = widthOf(content);
  const top =
    legendHeight(
      defenses.map((defense) => defenseLabels[defense]),
      width,
    ) + 28;
  const long = !numeric && ticks.ticktext.some((text) => text.length > 9);
  const upright = long && width < 620; // slanted labels would be cut on a narrow page
  const { cells, height } = grid(4, width, { top, gapPixels: upright ? 210 : long ? 150 : 76 });
  const bottom = upright ? 180 : long ? 120 : 52;
  const layout = {
    height: height + bottom - 52,
    margin: { l: 56, r: 12, t: top, b: bottom },
    annotations: [],
  };
  layout.legend = {
    orientation: "h",
    x: 0,
    xanchor: "left",
    y: 1 + 26 / (height - top - 52),
    yanchor: "bottom",
  };
  const traces = CURVE_METRICS.flatMap((metric, i) => {
    const { x, y, suffix } = cells[i];
    layout[`xaxis${suffix}`] = axis(esc(key), {
      ...ticks,
      domain: x,
      anchor: `y${suffix}`,
      tickangle: upright ? -90 : long ? -30 : 0,
    });
    const spot = { domain: y, anchor: `x${suffix}` };
    layout[`yaxis${suffix}`] =
      metric === "MA"
        ? maAxis(
            rows.flatMap((row) =>
              (statOf(row, "MA")?.values ?? []).map(([, value]) => 100 * value),
            ),
            spot,
          )
        : metricAxis(metric, spot);
    layout[`yaxis${suffix}`].title.text = "%";
    layout.annotations.push(panelTitle(metricOf(metric).label, cells[i]));
    if (!rows.some((row) => statOf(row, metric)))
      layout.annotations.push(emptyNote(`No ${metric} was recorded.`, cells[i]));
    return defenses.flatMap((defense) =>
      effectTraces(defense, rows, metric, { xaxis: `x${suffix}`, yaxis: `y${suffix}` }, place, {
        first: i === 0,
        lines: numeric,
      }),
    );
  });
  const where = others.length ? settingText(rows[0], others) : "";
  figure(content, "effect", `BA, MA, TPR and TNR over ${key}. ${where}`, traces, layout, {
    onPoint: (run) => openRun(run),
    caption: where,
  });
}
