// Who was rejected and why: the strip of verdicts by client and round.

/** Show the clients of a run. */
function showClients(index) {
  const run = data.runs[index];
  const row = rowOfRun(run);
  clientNames.forEach((name) => choose(`clients.${name}`, clientLabel(run, name, row)));
  choose("clients.round", null);
  update("clients");
  goTo("clients");
}

const clientNames = ["defense", ...sweptNames, "seed"];
const clientLabel = (run, name, row = rowOfRun(run)) =>
  name === "seed" ? String(run.seed) : labelOf(row, name);

section(
  "clients",
  (body) => {
    const runs = shownRuns().filter((run) => run.row >= 0 && isNumber(run.clients));
    const again = () => {
      choose("clients.round", null);
      update("clients");
    };
    const pick = picker("clients", clientNames, preferJudges(runs), clientLabel, again);
    const content = frame(body, pick.controls);
    const run = pick.current;
    if (!run) return content.replaceChildren(message("No run here has recorded verdicts."));
    const job = verdictsOf(run);
    if (job.value) return drawClients(content, run, job.value.rounds);
    content.dataset.run = run.id;
    job.promise
      .then(() => {
        if (content.dataset.run === run.id) update("clients");
      })
      .catch(() => content.replaceChildren(message("The verdicts of this run cannot be read.")));
    return undefined;
  },
  { lazy: true },
);

/** The first run shown by default is one of a defense that has scores. */
function preferJudges(runs) {
  const scored = (run) => (isNumber(run.metrics?.AUC) ? 0 : isNumber(run.metrics?.TPR) ? 1 : 2);
  return [...runs].sort((a, b) => scored(a) - scored(b));
}

/** The round shown: the chosen one, or the first attacked one. */
function chosenRound(run, rounds) {
  const index = run.rounds?.index ?? rounds.map((_, i) => i);
  const at = index.indexOf(Number(state.get("clients.round") ?? NaN));
  if (at >= 0 && at < rounds.length) return { index, at };
  const first = index.findIndex((round) => isAttacked(run, round));
  return { index, at: Math.min(Math.max(first, 0), rounds.length - 1) };
}

const isAttacked = (run, round) =>
  (run.rounds?.attacked ?? []).some(([a, b]) => a <= round && round <= b);

function drawClients(content, run, rounds) {
  delete content.dataset.run;
  if (!rounds.length) return content.replaceChildren(message("No round has been recorded yet."));
  if (!$(":scope > .strip", content)) {
    content.replaceChildren(
      el("p", { class: "run-head" }),
      el("div", { class: "strip figure" }),
      el("div", { class: "round-bar" }),
      el("p", { class: "round-facts", role: "status", "aria-live": "polite" }),
      el(
        "div",
        { class: "pair" },
        el("div", { class: "scores figure" }),
        el("div", { class: "roc figure" }),
      ),
    );
  }
  $(".run-head", content).replaceChildren(
    el("strong", {}, runName(run)),
    " ",
    el(
      "button",
      { type: "button", class: "link", onclick: () => openRun(runIndex.get(run)) },
      "Details of this run",
    ),
  );
  const clients = clientOrder(rounds);
  const round = chosenRound(run, rounds);
  drawStrip($(".strip", content), run, rounds, clients, round);
  drawRoundBar($(".round-bar", content), round);
  drawFacts($(".round-facts", content), run, rounds, round);
  drawScores($(".scores", content), rounds, clients, round);
  drawRoc($(".roc", content), run, rounds, round);
  return undefined;
}

function setRound(round) {
  choose("clients.round", round);
  update("clients");
}

function drawRoundBar(box, { index, at }) {
  let slider = $("input", box);
  if (!slider) {
    slider = el("input", {
      type: "range",
      min: 0,
      step: 1,
      id: "client-round",
      "data-control": "client-round",
    });
    slider.addEventListener("input", () =>
      setRound(slider.dataset.index.split(",")[Number(slider.value)]),
    );
    box.append(
      el("label", { for: "client-round" }, "Round"),
      slider,
      el("output", { for: "client-round" }),
    );
  }
  slider.dataset.index = index.join(",");
  slider.max = index.length - 1;
  slider.value = at;
  slider.setAttribute("aria-valuetext", `round ${index[at]}`);
  $("output", box).textContent = index[at];
}

function drawFacts(node, run, rounds, { index, at }) {
  const round = rounds[at];
  const count = (bad, mark) =>
    [...round.state].filter((s, i) => s === mark && (round.malicious[i] === "1") === bad).length;
  const group = (bad) => {
    const total = [...round.malicious].filter((mark) => (mark === "1") === bad).length;
    const parts = Object.keys(STATES)
      .map((mark) => [count(bad, mark), STATES[mark].name])
      .filter(([n]) => n)
      .map(([n, name]) => `${n} ${name}`);
    return `${total} ${bad ? "malicious" : "benign"}${total ? ` (${parts.join(", ")})` : ""}`;
  };
  const judged = rounds.some(({ state: verdicts }) => /[ar]/.test(verdicts));
  node.textContent =
    `Round ${index[at]}, ${isAttacked(run, index[at]) ? "attacked" : "not attacked"}: ${group(true)}, ${group(false)}.` +
    (judged ? "" : " This defense judges no client.");
}

function drawStrip(box, run, rounds, clients, { index, at }) {
  const marks = Object.keys(STATES);
  const position = new Map(clients.map(({ id }, i) => [id, i]));
  const z = clients.map(() => rounds.map(() => null));
  const hover = clients.map(() => rounds.map(() => ""));
  rounds.forEach((round, r) =>
    round.ids.forEach((id, i) => {
      const row = position.get(id);
      z[row][r] = Math.max(0, marks.indexOf(round.state[i]));
      hover[row][r] = hoverLines(
        `round ${index[r]}, client ${id}, ${round.malicious[i] === "1" ? "malicious" : "benign"}`,
        stateOf(round.state[i]).name,
        round.scores && isNumber(round.scores[i]) ? `score ${shortNumber(round.scores[i])}` : "",
      );
    }),
  );
  const present = marks.filter((_, i) => z.some((line) => line.includes(i)));
  const color = (mark) => STATES[mark][isDark() ? "dark" : "light"];
  const width = widthOf(box);
  const height = Math.min(900, Math.max(150, clients.length * (clients.length > 60 ? 8 : 13)));
  const top =
    legendHeight(
      present.map((mark) => STATES[mark].name),
      width,
    ) + 4;
  const nBad = clients.filter((client) => client.malicious).length;
  const step = Math.ceil(clients.length / Math.floor(height / 13));
  const ticks = clients.map((client, i) => ({ ...client, i })).filter(({ i }) => i % step === 0);
  figure(
    box,
    "verdicts",
    `Verdict on each client in each round of ${runName(run)}`,
    [
      {
        type: "heatmap",
        x: rounds.map((_, r) => r),
        y: clients.map((_, i) => i),
        z,
        zmin: 0,
        zmax: marks.length - 1,
        colorscale: marks.flatMap((mark, i) => [
          [i / marks.length, color(mark)],
          [(i + 1) / marks.length, color(mark)],
        ]),
        showscale: false,
        xgap: rounds.length > 80 ? 0 : 1,
        ygap: clients.length > 60 ? 0 : 1,
        hoverinfo: "text",
        text: hover,
        hoverongaps: false,
        customdata: clients.map(() => index.slice(0, rounds.length)),
      },
      ...present.map((mark) => ({
        type: "scatter",
        mode: "markers",
        x: [null],
        y: [null],
        name: STATES[mark].name,
        hoverinfo: "skip",
        marker: {
          symbol: "square",
          size: 12,
          color: color(mark),
          line: { color: theme().axis, width: 1 },
        },
      })),
    ],
    {
      height: height + top + 52,
      margin: { l: 84, r: 12, t: top, b: 52 },
      legend: {
        orientation: "h",
        x: 0,
        xanchor: "left",
        y: 1.01,
        yanchor: "bottom",
        itemclick: false,
        itemdoubleclick: false,
      },
      xaxis: axis("round", {
        range: [-0.5, rounds.length - 0.5],
        tickmode: "array",
        showgrid: false,
        tickvals: everyNth(rounds.length, width < 620 ? 8 : 20),
        ticktext: everyNth(rounds.length, width < 620 ? 8 : 20).map((r) => String(index[r])),
      }),
      yaxis: axis("", {
        range: [clients.length - 0.5, -0.5],
        tickmode: "array",
        showgrid: false,
        tickvals: ticks.map(({ i }) => i),
        ticktext: ticks.map(({ id, malicious }) => (malicious ? `▲ ${esc(id)}` : esc(id))),
        tickfont: { size: 10, color: theme().text },
        automargin: false,
      }),
      shapes: [
        {
          type: "rect",
          xref: "x",
          yref: "paper",
          x0: at - 0.5,
          x1: at + 0.5,
          y0: 0,
          y1: 1,
          line: { color: theme().text, width: 2 },
        },
        ...(nBad && nBad < clients.length
          ? [
              {
                type: "line",
                xref: "paper",
                yref: "y",
                x0: -0.01,
                x1: 1,
                y0: nBad - 0.5,
                y1: nBad - 0.5,
                line: { color: visible(MALICIOUS.color), width: 2 },
              },
            ]
          : []),
      ],
      annotations: [
        groupLabel("malicious", 0, nBad, MALICIOUS.color),
        groupLabel("benign", nBad, clients.length, BENIGN.color),
      ].filter(Boolean),
    },
    {
      onPoint: (round) => setRound(round),
      caption: `Clients by rounds; ▲ and the upper block are malicious clients (${nBad} of ${clients.length}). Select a column to see the scores of its round.${z.some((line) => line.includes(null)) ? " Blank: not selected in that round." : ""}`,
    },
  );
}

const everyNth = (n, most) => {
  const step = Math.max(1, Math.ceil(n / most));
  return Array.from({ length: n }, (_, i) => i).filter((i) => i % step === 0);
};

function groupLabel(text, start, end, color) {
  if (end <= start) return null;
  return {
    text,
    textangle: -90,
    xref: "paper",
    yref: "y",
    x: 0,
    y: (start + end - 1) / 2,
    xshift: -66,
    showarrow: false,
    font: { size: 12, color: visible(color), weight: 600 },
  };
}
