// The panel with everything about one run.

async function copyText(text, status) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Pages opened from a file may lack the clipboard API: copy through a selection.
    const area = el("textarea", { class: "hidden", readonly: true });
    area.value = text;
    $("#details").append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  status.textContent = "Copied";
  setTimeout(() => {
    status.textContent = "";
  }, 2000);
}

function commandBlock(title, text) {
  if (!text) return null;
  const status = el("span", { role: "status", "aria-live": "polite", class: "note" });
  return el(
    "div",
    { class: "command" },
    el("h3", {}, title),
    el("pre", { tabindex: 0 }, el("code", {}, text)),
    el(
      "p",
      {},
      el(
        "button",
        {
          type: "button",
          class: "small",
          "data-action": "copy",
          onclick: () => copyText(text, status),
        },
        "Copy",
      ),
      " ",
      status,
    ),
  );
}

function definitions(pairs) {
  return el(
    "dl",
    {},
    pairs
      .filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
  );
}

const valueText = (value) =>
  value !== null && typeof value === "object" ? JSON.stringify(value) : String(value);

/** Settings of the command line come first. */
function settingsPart(run) {
  const names = Object.keys(run.config ?? {});
  if (!names.length) return null;
  const words = (run.again ?? "")
    .split(/\s+/)
    .map((word) => word.replace(/^['"+]+/, "").split("=")[0]);
  const isSet = (name) =>
    words.includes(name) || words.includes(name.replace(/\.name$/, "")) || data.keys.includes(name);
  const list = (part) => definitions(part.map((name) => [name, valueText(run.config[name])]));
  const first = names.filter(isSet);
  return el(
    "div",
    {},
    first.length ? [el("h3", {}, "Settings of the command line"), list(first)] : [],
    el("details", {}, el("summary", {}, `All ${names.length} settings`), list(names)),
  );
}

function filesPart(run) {
  if (!run.files?.length) return null;
  return el(
    "div",
    {},
    el("h3", {}, "Files"),
    el("p", { class: "note" }, run.path),
    el(
      "ul",
      { class: "files" },
      run.files.map((file) =>
        el(
          "li",
          {},
          el(
            "a",
            { href: `${run.folder}/${file.split("/").map(encodeURIComponent).join("/")}` },
            file,
          ),
        ),
      ),
    ),
  );
}

function openRun(index) {
  const run = data.runs[index];
  if (!run) return;
  const dialog = $("#details");
  const go = (action) => () => {
    dialog.close();
    action();
  };
  const row = rowOfRun(run);
  const seconds = Object.entries(run.seconds ?? {}).filter(([, value]) => isNumber(value));
  const parts = [
    el(
      "div",
      { class: "details-head" },
      el("h2", { id: "details-title", tabindex: -1 }, runName(run)),
      el(
        "button",
        { type: "button", "data-action": "close", onclick: () => dialog.close() },
        "Close",
      ),
    ),
    run.reason
      ? el(
          "div",
          { class: "reason" },
          el("strong", {}, run.status),
          el("pre", { tabindex: 0 }, run.reason),
        )
      : null,
    definitions([
      ["run", run.id],
      ["status", run.status],
      ["seed", String(run.seed ?? "-")],
      ...runMetrics
        .filter((key) => isNumber(run.metrics?.[key]))
        .map((key) => [
          withUnit(key),
          atLeast(run.censored?.includes(key)) + formatMetric(key, run.metrics[key]),
        ]),
      ["rounds recorded", run.rounds ? String(run.rounds.index.length) : null],
    ]),
    el(
      "p",
      { class: "actions" },
      run.rounds && row
        ? el("button", { type: "button", onclick: go(() => showCurves(row)) }, "Show curves")
        : null,
      " ",
      isNumber(run.clients) && row && isShown(run)
        ? el("button", { type: "button", onclick: go(() => showClients(index)) }, "Show clients")
        : null,
    ),
    commandBlock("Repeat this run", run.again),
    run.command && run.command !== run.again
      ? commandBlock("Command line that made it", run.command)
      : null,
    el(
      "div",
      {},
      el("h3", {}, "Made with"),
      definitions([
        ["commit", run.commit],
        ["processor", run.processor],
        ...Object.entries(run.versions ?? {}).map(([name, value]) => [name, valueText(value)]),
      ]),
    ),
    seconds.length
      ? el(
          "div",
          {},
          el("h3", {}, "Seconds"),
          definitions(seconds.map(([name, value]) => [name, shortNumber(value)])),
        )
      : null,
    settingsPart(run),
    filesPart(run),
  ];
  dialog.replaceChildren(...parts.filter(Boolean));
  dialog.dataset.run = run.id;
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  $("#details-title").focus();
}

$("#details").addEventListener("click", (event) => {
  if (event.target === event.currentTarget) event.currentTarget.close();
});
