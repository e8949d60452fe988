// Paired comparisons over seeds, and ranks over settings.

function pairedSettings() {
  const found = new Map(data.paired.map((pair) => [JSON.stringify(pair.setting), pair.setting]));
  return [...found.values()].filter((setting) =>
    data.keys.every((name, i) => passes(name, setting[i])),
  );
}

const pairedRead = (setting, name) => setting[data.keys.indexOf(name)];

function pairedTable(pairs, metric) {
  const lower = metricOf(metric).lower_is_better;
  const better = (pair) => {
    if (pair.mean === 0) return "equal";
    return defenseLabels[pair.mean < 0 === lower ? pair.a : pair.b];
  };
  const points = (value) => (isNumber(value) ? `${value > 0 ? "+" : ""}${percent(value)}` : "-");
  return table(
    "Paired comparisons",
    [
      ["defenses", (pair) => `${defenseLabels[pair.a]} ${MINUS} ${defenseLabels[pair.b]}`],
      ["shared seeds", (pair) => pair.n, "num"],
      [`difference of ${metric} (points)`, (pair) => points(pair.mean), "num"],
      [
        "95 % interval",
        (pair) => (isNumber(pair.low) ? `[${points(pair.low)}, ${points(pair.high)}]` : "-"),
        "num",
      ],
      ["better on average", better],
      ["p", (pair) => pValue(pair.p), "num"],
      ["p (Holm)", (pair) => `${pValue(pair.p_holm)}${pair.stars ? ` ${pair.stars}` : ""}`, "num"],
      ["smallest reachable p", (pair) => pValue(pair.smallest_p), "num"],
    ],
    pairs,
    (pair) => ({
      "data-a": defenseLabels[pair.a],
      "data-b": defenseLabels[pair.b],
      "data-value": pair.mean,
    }),
  );
}

function pairedPart(box) {
  const settings = pairedSettings();
  const metric = chosen("stats.metric", ["BA", "MA"]);
  const pick = picker("stats", sweptNames, settings, pairedRead, () => update("statistics"));
  const content = frame(box, [
    select(
      "Metric",
      ["BA", "MA"],
      metric,
      (value) => {
        choose("stats.metric", value);
        update("statistics");
      },
      { "data-control": "stats-metric" },
    ),
    ...pick.controls,
  ]);
  const key = JSON.stringify(pick.current ?? null);
  const all = data.paired.filter(
    (pair) => pair.metric === metric && JSON.stringify(pair.setting) === key,
  );
  const pairs = all.filter(
    (pair) =>
      passes("defense", defenseLabels[pair.a]) && passes("defense", defenseLabels[pair.b]),
  );
  if (!pairs.length)
    return content.replaceChildren(message("No two defenses share a seed in this setting."));
  const smallest = Math.min(1, all.length * Math.min(...all.map((pair) => pair.smallest_p)));
  return content.replaceChildren(
    pairedTable(pairs, metric),
    el(
      "p",
      { class: "note" },
      "Two-sided sign-flip test over the shared seeds. Holm’s correction is for all pairs of this setting; * p < 0.05, ** p < 0.01, *** p < 0.001 after it.",
      smallest < 0.05
        ? ""
        : ` With ${plural(all.length, "pair")} and so few shared seeds, no corrected p can be below ${pValue(smallest)}, so none can be significant; the intervals still tell how large a difference is.`,
    ),
  );
}

let nDiagrams = 0;

/** The diagram comes from matplotlib as SVG text. It is parsed as SVG, so that it cannot run scripts. */
function svgNode(text, label) {
  const root = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
  if (root.nodeName !== "svg") return null;
  root.querySelectorAll("script, foreignObject").forEach((node) => node.remove());
  // matplotlib's styles and ids would reach beyond the diagram.
  root.querySelectorAll("style").forEach((node) => {
    node.textContent = node.textContent.replace(/\*\s*\{/g, ".diagram * {");
  });
  const prefix = `diagram-${(nDiagrams += 1)}-`;
  for (const node of [root, ...root.querySelectorAll("*")]) {
    for (const attribute of [...node.attributes]) {
      if (attribute.name === "id") attribute.value = prefix + attribute.value;
      else if (attribute.name.endsWith("href"))
        attribute.value = attribute.value.replace(/^#/, `#${prefix}`);
      else attribute.value = attribute.value.replace(/url\(#/g, `url(#${prefix}`);
    }
  }
  const node = document.importNode(root, true);
  node.setAttribute("role", "img");
  node.setAttribute("aria-label", label);
  return el(
    "div",
    { class: "scroll diagram", tabindex: 0, role: "region", "aria-label": label },
    node,
  );
}

function ranksPart(metric) {
  const ranks = data.ranks?.[metric];
  if (!ranks)
    return [
      message(
        `Ranks of ${metric} need at least three defenses that were run in the same two or more settings.`,
      ),
    ];
  const order = [...ranks.names].sort((a, b) => ranks.mean_ranks[a] - ranks.mean_ranks[b]);
  const enough = ranks.n_blocks >= ranks.blocks_needed;
  const limit = enough
    ? ""
    : ` With ${plural(ranks.names.length, "defense")}, telling any two apart takes at least ${ranks.blocks_needed} settings, so the bar joins all of them.`;
  const parts = [
    el(
      "p",
      {},
      `Friedman test over ${plural(ranks.n_blocks, "setting")}: p ${ranks.p < 0.001 ? "" : "= "}${pValue(ranks.p)}. Rank 1 is the best.${ranks.svg ? " Defenses joined by a bar do not differ significantly." : ""}${limit}`,
    ),
  ];
  if (ranks.svg)
    parts.push(
      svgNode(
        ranks.svg,
        `Critical-difference diagram of ${metric}. Mean ranks: ${order.map((name) => `${name} ${ranks.mean_ranks[name].toFixed(2)}`).join(", ")}`,
      ),
    );
  parts.push(
    el(
      "div",
      { class: "side-by-side" },
      table(
        `Mean ranks of ${metric}`,
        [
          ["defense", (name) => name],
          ["mean rank", (name) => ranks.mean_ranks[name].toFixed(2), "num"],
        ],
        order,
      ),
      table(
        `Pairs of defenses by ${metric}`,
        [
          ["pair", ([a, b]) => `${a}, ${b}`],
          ["p (Holm)", ([, , p]) => pValue(p), "num"],
        ],
        [...ranks.pairs].sort((a, b) => a[2] - b[2]),
      ),
    ),
  );
  if (ranks.dropped?.length)
    parts.push(
      el(
        "p",
        { class: "note" },
        `Left out, since not every defense has a value: ${ranks.dropped.map(String).join("; ")}.`,
      ),
    );
  return parts;
}

section("statistics", (body) => {
  if (!$(":scope > .paired", body)) {
    body.replaceChildren(
      el("h3", {}, "Paired comparisons"),
      el("div", { class: "paired" }),
      el("h3", {}, "Ranks over settings"),
      el("div", { class: "ranks" }),
    );
  }
  pairedPart($(".paired", body));
  const note = passing.active.length
    ? [message("Ranks are over all settings and defenses; the filters do not apply to them.")]
    : [];
  $(".ranks", body).replaceChildren(
    ...note,
    ...["BA", "MA"]
      .filter((metric) => metrics.has(metric))
      .flatMap((metric) => [el("h4", {}, metricOf(metric).label), ...ranksPart(metric)])
      .filter(Boolean),
  );
});
