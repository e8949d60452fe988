// Worst case, published numbers, missing runs: plain tables.

/** Build a table in a box that scrolls. A column is [title, cell of an item, class]. */
function table(label, columns, items, rowAttributes = () => ({})) {
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          columns.map(([title, , kind]) => el("th", { scope: "col", class: kind }, title)),
        ),
      ),
      el(
        "tbody",
        {},
        items.map((item) =>
          el(
            "tr",
            rowAttributes(item),
            columns.map(([, cell, kind], i) => {
              const content = cell(item);
              return el(i ? "td" : "th", { class: kind, scope: i ? null : "row" }, content);
            }),
          ),
        ),
      ),
    ),
  );
}

const link = (text, onclick, label) =>
  el("button", { type: "button", class: "link", onclick, "aria-label": label }, text);

// ---- worst case

const worstNames = data.keys.filter((name) => name !== "attack" && !name.startsWith("attack."));

/** Rows of the defense and setting of a worst case, one per attack. */
const rowsOfWorst = (item) =>
  data.rows.filter(
    (row) =>
      row.defense === item.defense &&
      worstNames.every((name, i) => labelOf(row, name) === item.setting[i]),
  );
const isSame = (a, b) => isNumber(a) && isNumber(b) && Math.abs(a - b) < 1e-5;

/** The row that a worst case comes from. */
const rowOfWorst = (item) =>
  rowsOfWorst(item).find(
    (row) =>
      isSame(statOf(row, "BA")?.mean, item.mean) &&
      (!data.keys.includes("attack") || String(item.attack).startsWith(labelOf(row, "attack"))),
  );

function adaptiveText(item) {
  if (!item.adaptive_tried?.length)
    return el("strong", { class: "flag" }, "no adaptive attack tried");
  return `${item.adaptive_tried.join(", ")}${item.adaptive ? " (the worst)" : ""}`;
}

/** The worst seed over all attacks, which need not be of the attack with the worst mean. */
function worstSeed(item) {
  if (!item.worst_seed) return "-";
  const [seed, value] = item.worst_seed;
  const own = rowOfWorst(item);
  const rows = [own, ...rowsOfWorst(item)].filter(Boolean);
  const row = rows.find((candidate) =>
    (statOf(candidate, "BA")?.values ?? []).some(([s, v]) => s === seed && isSame(v, value)),
  );
  const attack =
    row && row !== own && data.keys.includes("attack") ? `, ${labelOf(row, "attack")}` : "";
  const text = `${percent(value)} (seed ${seed}${attack})`;
  return row
    ? link(
        text,
        () => openRun(runOfSeed(row, seed)),
        `Open the run with seed ${seed}, BA ${percent(value)}`,
      )
    : text;
}

/** The most attacks that any defense met in the setting of a worst case. */
function mostAttacks(item) {
  const same = data.worst.filter((other) => other.setting.join("\n") === item.setting.join("\n"));
  return Math.max(...same.map((other) => other.n_attacks));
}

section("worst", (body) => {
  const items = data.worst.filter(
    (item) =>
      passes("defense", defenseLabels[item.defense]) &&
      worstNames.every((name, i) => passes(name, item.setting[i])),
  );
  if (!items.length) return body.replaceChildren(message("No finished run has a BA here."));
  const varying = worstNames
    .map((name, i) => [name, i])
    .filter(([name]) => sweptNames.includes(name));
  const place = (item) => varying.map(([name, i]) => labelsOf(name).indexOf(item.setting[i]));
  const before = (a, b) => a.map((value, i) => value - b[i]).find((difference) => difference) ?? 0;
  const shown = [...items].sort((a, b) => before(place(a), place(b)) || a.mean - b.mean);
  const note = passing.active.some(([name]) => name === "attack")
    ? [
        message(
          "The worst case is over all attacks that were run; the attack filter does not apply to this table.",
        ),
      ]
    : [];
  return body.replaceChildren(
    ...note,
    table(
      "Worst case",
      [
        ["defense", (item) => defenseLabels[item.defense]],
        ...varying.map(([name, i]) => [name, (item) => item.setting[i]]),
        ["worst BA (%)", (item) => percent(item.mean), "num"],
        ["95 % interval", (item) => interval("BA", item.low, item.high) || "-", "num"],
        [
          "under",
          (item) => {
            const row = rowOfWorst(item);
            return row
              ? link(
                  item.attack ?? "-",
                  () => showCurves(row),
                  `Show the curves of ${defenseLabels[item.defense]} under ${item.attack}`,
                )
              : (item.attack ?? "-");
          },
        ],
        ["worst seed", worstSeed, "num"],
        [
          "attacks run",
          (item) =>
            item.n_attacks < mostAttacks(item)
              ? el("strong", { class: "flag" }, `${item.n_attacks} of ${mostAttacks(item)}`)
              : item.n_attacks,
          "num",
        ],
        ["adaptive attacks", adaptiveText],
      ],
      shown,
      (item) => ({ "data-defense": defenseLabels[item.defense], "data-value": item.mean }),
    ),
  );
});

// ---- published numbers and missing runs

section("published", (body) => {
  const items = data.reported ?? [];
  document.getElementById("published").hidden = !items.length;
  if (!items.length) return;
  const points = (value) => (isNumber(value) ? `${value > 0 ? "+" : ""}${percent(value)}` : "-");
  body.replaceChildren(
    table(
      "Published numbers",
      [
        ["source", (item) => [item.source, item.where].filter(Boolean).join(", "), "mid"],
        [
          "paper’s data set",
          (item) =>
            [
              item.dataset ?? "",
              item.stands_in
                ? el("span", {}, " ", el("strong", { class: "flag" }, "other data"))
                : null,
            ].filter(Boolean),
        ],
        ["attack", (item) => breakable(item.attack ?? "-")],
        ["defense", (item) => item.defense ?? "-"],
        ...(items.some((item) => item.settings)
          ? [["paper’s settings", (item) => item.settings || "-"]]
          : []),
        ...(items.some((item) => item.our_settings)
          ? [["our settings", (item) => item.our_settings || "-"]]
          : []),
        ["metric", (item) => item.metric],
        ["paper (%)", (item) => percent(item.paper), "num"],
        ["ours (%)", (item) => percent(item.ours), "num"],
        ["95 % interval", (item) => interval(item.metric, item.low, item.high) || "-", "num"],
        ["seeds", (item) => item.n ?? "-", "num"],
        ["difference (points)", (item) => points(item.difference), "num"],
        ["note", (item) => item.note || "", "wrap"],
      ],
      items,
      (item) => ({ "data-metric": item.metric, "data-value": item.ours }),
    ),
  );
});

section("missing", (body) => {
  document.getElementById("missing").hidden = !data.missing.length;
  if (!data.missing.length) return;
  body.replaceChildren(
    table(
      "Missing runs",
      [
        ["run", (item) => item.name],
        ["status", (item) => item.status],
        ["reason", (item) => item.reason || "-", "wrap"],
      ],
      data.missing,
      (item) => ({ "data-missing": item.name }),
    ),
  );
});
