// The scores of one round with the threshold, and their ROC.

function scoreTraces(round, clients) {
  const place = new Map(clients.map(({ id }, i) => [id, i]));
  const points = round.ids
    .map((id, i) => ({
      id,
      x: place.get(id),
      y: round.scores[i],
      bad: round.malicious[i] === "1",
      mark: round.state[i],
    }))
    .filter((point) => isNumber(point.y));
  const groups = [true, false].flatMap((bad) =>
    Object.keys(STATES).map((mark) => ({
      bad,
      mark,
      own: points.filter((p) => p.bad === bad && p.mark === mark),
    })),
  );
  return groups
    .filter(({ own }) => own.length)
    .map(({ bad, mark, own }) => {
      const look = bad ? MALICIOUS : BENIGN;
      const open = mark === "a" || mark === "-";
      return {
        type: "scatter",
        mode: "markers",
        name: `${bad ? "malicious" : "benign"}, ${STATES[mark].name}`,
        x: own.map((p) => p.x),
        y: own.map((p) => p.y),
        marker: {
          color: visible(look.color),
          symbol: look.symbol + (open ? "-open" : ""),
          size: 10,
          line: { width: 1.8, color: visible(look.color) },
        },
        hoverinfo: "text",
        hovertext: own.map((p) =>
          hoverLines(
            `client ${p.id}, ${bad ? "malicious" : "benign"}`,
            `score ${shortNumber(p.y)}`,
            STATES[mark].name,
          ),
        ),
      };
    });
}

/** The threshold as a line, or the gap between accepted and rejected scores as a band. */
function cutMarks(round, log) {
  const across = { xref: "paper", x0: 0, x1: 1, yref: "y" };
  const cut = round.cut;
  if (isNumber(round.threshold) && !(log && round.threshold <= 0)) {
    return {
      name: `threshold ${shortNumber(round.threshold)}`,
      shape: {
        type: "line",
        ...across,
        y0: round.threshold,
        y1: round.threshold,
        line: { color: theme().text, dash: "dash", width: 1.5 },
      },
    };
  }
  if (cut && cut.every(isNumber) && !(log && cut[0] <= 0)) {
    return {
      name: `verdicts change between ${apart(cut[0], cut[1]).join(" and ")}`,
      shape: {
        type: "rect",
        layer: "below",
        ...across,
        y0: cut[0],
        y1: cut[1],
        fillcolor: theme().shade,
        line: { color: theme().text, width: 1, dash: "dash" },
      },
    };
  }
  return null;
}

/** Two numbers with as many digits as it takes to tell them apart. */
function apart(a, b) {
  for (let digits = 3; digits < 8; digits += 1) {
    const texts = [a, b].map((value) =>
      String(Number(value.toPrecision(digits))).replace("-", MINUS),
    );
    if (texts[0] !== texts[1]) return texts;
  }
  return [shortNumber(a), shortNumber(b)];
}

/** The mark of the threshold in the legend. */
const cutLegend = (cut) => ({
  type: "scatter",
  mode: "lines",
  x: [null],
  y: [null],
  name: cut.name,
  hoverinfo: "skip",
  line: { color: theme().text, dash: "dash", width: 1.5 },
});

function drawScores(box, rounds, clients, { index, at }) {
  if (!rounds.some((round) => round.scores))
    return instead(box, message("This defense has no scores."));
  const round = rounds[at];
  if (!round.scores) return instead(box, message("This round has no scores."));
  if (!$(":scope > .inner", box)) {
    instead(box, el("div", { class: "controls" }), el("div", { class: "inner" }));
  }
  const values = round.scores.filter(isNumber);
  const canLog = values.length > 0 && values.every((value) => value > 0);
  const wide = canLog && Math.max(...values) > 30 * Math.min(...values);
  const log = canLog && (state.get("clients.log") ?? (wide ? "1" : "0")) === "1";
  const toggle = checkbox(
    canLog ? "Log scale" : "Log scale (needs positive scores)",
    log,
    (on) => {
      choose("clients.log", on ? 1 : 0);
      update("clients");
    },
    { "data-control": "score-log", disabled: !canLog },
  );
  showControls(box.firstChild, [toggle]);
  const inner = box.lastChild;
  const cut = cutMarks(round, log);
  const traces = [...scoreTraces(round, clients), ...(cut ? [cutLegend(cut)] : [])];
  const width = widthOf(inner);
  const top =
    legendHeight(
      traces.map((trace) => trace.name),
      width,
    ) + 8;
  const ticks = everyNth(clients.length, Math.floor(width / 28));
  const nBad = clients.filter((client) => client.malicious).length;
  figure(
    inner,
    "scores",
    `Scores of the clients in round ${index[at]}`,
    traces,
    {
      height: 320 + top,
      margin: { l: 64, r: 12, t: top, b: 52 },
      xaxis: axis("client (malicious first)", {
        range: [-0.8, clients.length - 0.2],
        tickmode: "array",
        tickvals: ticks,
        ticktext: ticks.map((i) => esc(clients[i].id)),
        showgrid: false,
      }),
      yaxis: axis("score", log ? { type: "log", ...logTicks(values) } : {}),
      shapes: [...(cut ? [cut.shape] : []), ...divider(nBad, clients.length)],
    },
    {
      caption: `Scores in round ${index[at]}. Filled marks were rejected, open marks accepted or not judged.${noCut(round)}`,
    },
  );
  return undefined;
}

const noCut = (round) =>
  isNumber(round.threshold) || round.cut
    ? ""
    : " No single score separates the verdicts of this round.";

/** Ticks at 1, 2, 5, 10, ... or, over many decades, at powers of ten. */
const logTicks = (values) =>
  Math.max(...values) / Math.min(...values) > 1e3
    ? { dtick: 1, exponentformat: "power" }
    : { dtick: "D2", exponentformat: "none" };

/** A line between the malicious and the benign clients. */
function divider(nBad, n) {
  if (!nBad || nBad === n) return [];
  return [
    {
      type: "line",
      xref: "x",
      yref: "paper",
      x0: nBad - 0.5,
      x1: nBad - 0.5,
      y0: 0,
      y1: 1,
      line: { color: theme().axis, width: 1, dash: "dot" },
    },
  ];
}

function drawRoc(box, run, rounds, { index, at }) {
  if (!rounds.some((round) => round.scores)) return instead(box);
  const roc = rocOf(rounds[at]);
  const attacked = rounds
    .filter((_, i) => isAttacked(run, index[i]))
    .map(rocOf)
    .filter(Boolean);
  if (!roc && !attacked.length)
    return instead(
      box,
      message("No ROC: it needs malicious and benign clients with scores in one round."),
    );
  const average = attacked.length ? meanRoc(attacked) : null;
  const line = (points, name, look) => ({
    type: "scatter",
    mode: "lines",
    x: points.map(([x]) => 100 * x),
    y: points.map(([, y]) => 100 * y),
    name,
    line: look,
    hoverinfo: "text",
    hovertext: points.map(([x, y]) =>
      hoverLines(
        `benign rejected ${fixed(100 * x, 1)} %`,
        `malicious rejected ${fixed(100 * y, 1)} %`,
      ),
    ),
  });
  const traces = [
    {
      type: "scatter",
      mode: "lines",
      x: [0, 100],
      y: [0, 100],
      showlegend: false,
      hoverinfo: "skip",
      line: { color: theme().axis, dash: "dot", width: 1 },
    },
    ...(roc
      ? [
          line(roc.points, `round ${index[at]}: AUC ${percent(roc.auc)} %`, {
            color: visible(MALICIOUS.color),
            width: 3,
          }),
        ]
      : []),
    ...(average
      ? [
          line(
            average.points,
            `mean of ${plural(average.n, "attacked round")}: AUC ${percent(average.auc)} %`,
            { color: theme().text, width: 1.6, dash: "dash" },
          ),
        ]
      : []),
  ];
  figure(
    box,
    "roc",
    `ROC of the scores. ${traces
      .slice(1)
      .map((trace) => trace.name)
      .join("; ")}`,
    traces,
    {
      height: 392,
      margin: { l: 56, r: 12, t: 60, b: 52 },
      legend: {
        orientation: "v",
        x: 0,
        xanchor: "left",
        y: 1.02,
        yanchor: "bottom",
        font: { size: 12 },
      },
      xaxis: axis("benign clients rejected (%)", { range: [-3, 103], dtick: 25 }),
      yaxis: axis("malicious clients rejected (%)", { range: [-3, 103], dtick: 25 }),
    },
    {
      caption: [
        roc
          ? ""
          : `Round ${index[at]} has no ROC: it needs malicious and benign clients with scores.`,
        average
          ? "The mean is taken at equal rates of benign clients rejected. Rounds of a run depend on each other, so no interval is given."
          : "",
      ]
        .filter(Boolean)
        .join(" "),
    },
  );
  return undefined;
}
