// Start: read the address, draw what is in view, then the rest when it is reached.
function drawFrame() {
  document.title = `${data.title} - fedbench`;
  $("#title").textContent = data.title;
  $("#caption").textContent = data.caption ?? "";
  if (data.verdicts_left_out) {
    const runs = plural(data.verdicts_left_out, "run");
    $("#clients .hint").append(` To keep the page small, it lacks the verdicts of ${runs}.`);
  }
  $("#footer").replaceChildren(
    el("p", {}, `fedbench ${data.version}, ${data.generated}`),
    el("pre", { tabindex: 0 }, el("code", {}, data.command ?? "")),
  );
}

function drawNav() {
  const ids = [
    "overview",
    "filters",
    ...[...$$("main > section")].map((node) => node.id).filter((id) => id !== "overview"),
  ];
  const items = ids
    .filter((id) => !document.getElementById(id).hidden)
    .map((id) => {
      const node = document.getElementById(id);
      const text = node.dataset.nav ?? $("h2", node).textContent;
      return el(
        "li",
        {},
        el(
          "a",
          {
            href: `#${id}`,
            onclick: (event) => {
              event.preventDefault();
              goTo(id);
            },
          },
          text,
        ),
      );
    });
  $("#nav ul").replaceChildren(...items);
  $("#nav").append(
    el("button", {
      type: "button",
      id: "nav-filter",
      hidden: true,
      onclick: () => goTo("filters"),
    }),
  );
}

/** Mark the link of the section in view. */
function watchNav() {
  const observer = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        const anchor = $(`#nav a[href="#${target.id}"]`);
        if (isIntersecting) anchor?.setAttribute("aria-current", "location");
        else anchor?.removeAttribute("aria-current");
      }
    },
    { rootMargin: "-30% 0px -60% 0px" },
  );
  $$("main > section").forEach((node) => observer.observe(node));
}

function start() {
  readHash();
  applyFilters();
  drawFrame();
  sections.forEach((entry) => {
    if (!entry.lazy) render(entry);
  });
  drawNav();
  drawFilters();
  if (innerWidth < 700) $("#filters").open = false;
  watchSections();
  watchNav();
  watchTheme();
  $(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    $("#main").focus();
  });
  addEventListener("hashchange", () => {
    readHash();
    filtersChanged();
    document.getElementById(currentSection)?.scrollIntoView();
  });
  if (currentSection) document.getElementById(currentSection)?.scrollIntoView();
}

/** Do early what a figure, or a print, would wait for. */
function prepare() {
  loadPlotly();
  const clients = sections.get("clients");
  if (clients.dirty) render(clients); // starts to unpack the first run
}

start();
window.fedbench = {
  data,
  ready: new Promise((resolve) => {
    requestAnimationFrame(() =>
      setTimeout(() => {
        document.body.dataset.ready = "true";
        resolve();
        (window.requestIdleCallback ?? setTimeout)(prepare);
      }),
    );
  }),
};
