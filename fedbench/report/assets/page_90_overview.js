// Counts, and what the data says in a few sentences.

/** Worst mean BA of each defense over the rows shown, lowest first. */
function worstCases(rows) {
  return shownDefenses()
    .map((defense) => {
      const own = rows.filter((row) => row.defense === defense && statOf(row, "BA"));
      const row = own.reduce(
        (a, b) => (a && statOf(a, "BA").mean >= statOf(b, "BA").mean ? a : b),
        null,
      );
      return { defense, row, n: own.length };
    })
    .filter(({ row }) => row)
    .sort((a, b) => statOf(a.row, "BA").mean - statOf(b.row, "BA").mean);
}

const UNDER = sweptNames.includes("attack") ? "under" : "with";

function describe(row) {
  const stat = statOf(row, "BA");
  const setting = settingText(row);
  const seeds =
    stat.n > 1 ? `mean of ${stat.n} seeds; worst seed ${percent(stat.worst[1])} %` : "one seed";
  return `${defenseLabels[row.defense]}, ${percent(stat.mean)} %${setting ? ` ${UNDER} ${setting}` : ""} (${seeds})`;
}

function answer() {
  const cases = worstCases(shownRows());
  if (!cases.length) return [];
  const measured = shownRows().filter((row) => statOf(row, "BA"));
  const most = unique(measured.map((row) => JSON.stringify(row.setting))).length;
  const full = cases.filter(({ n }) => n === most);
  if (!full.length) {
    return [`No defense has results in all ${most} settings, so worst cases are not compared yet.`];
  }
  const sentences = [];
  if (full.length > 1)
    sentences.push(
      `Lowest worst-case BA: ${describe(full[0].row)}.`,
      `Highest worst-case BA: ${describe(full[full.length - 1].row)}.`,
    );
  else sentences.push(`Worst-case BA: ${describe(full[0].row)}.`);
  const partial = cases.filter(({ n }) => n < most);
  if (partial.length) {
    sentences.push(
      `Not compared, since they have results in fewer than ${plural(most, "setting")}: ${partial.map(({ defense, n }) => `${defenseLabels[defense]} (${n})`).join(", ")}.`,
    );
  }
  return sentences;
}

function splitSentences() {
  const rows = shownRows().filter((row) => statOf(row, "BA")?.split);
  if (!rows.length) return [];
  const text = (row) => {
    const { above, n } = statOf(row, "BA");
    return `${[defenseLabels[row.defense], settingText(row)].filter(Boolean).join(` ${UNDER} `)} (${above} of ${n} seeds above)`;
  };
  const rest = rows.length > 3 ? `; and ${plural(rows.length - 3, "other")}` : "";
  return [
    `BA is above 50 % for some seeds and below for others: ${rows.slice(0, 3).map(text).join("; ")}${rest}.`,
  ];
}

function adaptiveSentence() {
  const defenses = shownDefenses().filter((defense) =>
    data.worst.some((item) => item.defense === defense),
  );
  const without = defenses.filter(
    (defense) =>
      !data.worst.some((item) => item.defense === defense && item.adaptive_tried?.length),
  );
  if (!without.length) return [];
  const names =
    without.length === defenses.length && without.length > 1
      ? "any of these defenses"
      : without.map((defense) => defenseLabels[defense]).join(", ");
  return [`No adaptive attack was tried against ${names}.`];
}

function seedSentence() {
  const counts = shownRows()
    .map((row) => statOf(row, "BA")?.n ?? 0)
    .filter(Boolean);
  if (!counts.length || Math.max(...counts) >= 6) return [];
  return [
    `With at most ${plural(Math.max(...counts), "seed")} per setting, no difference between two defenses can be significant.`,
  ];
}

function filterText() {
  return passing.active.map(([name, labels]) => `${name} ${[...labels].join(", ")}`).join("; ");
}

section("overview", (body) => {
  const runs = shownRuns();
  const finished = runs.filter((run) => run.status === "finished").length;
  const statuses = unique(["finished", "failed", ...runs.map((run) => run.status)]);
  const numbers = [
    ...statuses.map((status) => [runs.filter((run) => run.status === status).length, status]),
    [data.missing.length, "missing"],
    [shownDefenses().length, "defenses"],
    [unique(shownRows().map((row) => JSON.stringify(row.setting))).length, "settings"],
  ];
  const sentences = [...answer(), ...splitSentences(), ...adaptiveSentence(), ...seedSentence()];
  body.replaceChildren(
    el(
      "ul",
      { class: "numbers" },
      numbers
        .filter(([n, name]) => n || name === "finished")
        .map(([n, name]) =>
          el(
            "li",
            { "data-count": name },
            el("span", { class: "big" }, String(n)),
            ` ${n === 1 ? name.replace(/s$/, "") : name}`,
          ),
        ),
    ),
    el(
      "ul",
      { class: "sentences" },
      sentences.map((text) => el("li", {}, text)),
    ),
    passing.active.length ? el("p", { class: "note" }, `Filtered: ${filterText()}.`) : "",
    sentences.length
      ? ""
      : message(finished ? "No BA was measured in these runs." : "No run has finished yet."),
  );
});
