// What the user chose, kept in the address: #section?name=value&name=value
const state = new Map();
let currentSection = "";

function readHash() {
  const text = location.hash.slice(1);
  const [section, query = ""] = text.includes("?") ? text.split(/\?(.*)/s) : [text, ""];
  currentSection = section;
  state.clear();
  for (const [name, value] of new URLSearchParams(query)) state.set(name, value);
}

function writeHash() {
  const query = new URLSearchParams([...state].sort()).toString();
  const hash = `#${currentSection}${query ? `?${query}` : ""}`;
  history.replaceState(null, "", hash === "#" ? location.pathname + location.search : hash);
}

function choose(name, value) {
  if (value === null || value === undefined || value === "") state.delete(name);
  else state.set(name, String(value));
  writeHash();
}

/** The chosen value if it is among the options, else the default. */
function chosen(name, options, fallback = options[0]) {
  const value = state.get(name);
  return options.includes(value) ? value : fallback;
}

const isOn = (name) => state.get(name) === "1";

// ---- sections: drawn at once, or figures when they come into view

const sections = new Map();
const NAV_HEIGHT = 56; // CSS pixels, as the scroll padding in page.css

/** Register a section. `draw` renders into the body; `lazy` sections wait until they are seen. */
function section(id, draw, { lazy = false } = {}) {
  sections.set(id, {
    id,
    draw,
    lazy,
    dirty: true,
    visible: false,
    node: document.getElementById(id),
  });
}

function render(entry) {
  entry.dirty = false;
  const body = $(".body", entry.node);
  entry.draw(body);
  if (body.firstChild) body.style.minHeight = "0"; // page.css keeps room for figures not drawn yet
}

/** Draw a section anew: now if it is in view or not lazy, else when it comes into view. */
function update(...ids) {
  for (const id of ids) {
    const entry = sections.get(id);
    if (!entry) continue;
    entry.dirty = true;
    if (!entry.lazy || entry.visible) render(entry);
  }
}

const updateAll = () => update(...sections.keys());

/** Draw a section; if it is above the window, what is in the window stays where it is. */
function renderInPlace(entry) {
  const before = entry.node.getBoundingClientRect();
  render(entry);
  const growth = entry.node.getBoundingClientRect().height - before.height;
  if (before.bottom <= NAV_HEIGHT + 10 && growth) scrollBy({ top: growth, behavior: "instant" });
}

function watchSections() {
  const observer = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        const entry = sections.get(target.id);
        entry.visible = isIntersecting;
        if (isIntersecting && entry.dirty) renderInPlace(entry);
      }
    },
    { rootMargin: "400px 0px" },
  );
  sections.forEach((entry) => entry.lazy && observer.observe(entry.node));
}

function goTo(id) {
  currentSection = id;
  writeHash();
  const node = document.getElementById(id);
  const entry = sections.get(id);
  if (entry?.dirty) render(entry);
  // At once: figures that are drawn on the way would move the goal of a smooth scroll.
  node.scrollIntoView({ behavior: "instant", block: "start" });
  const heading = $("h2", node) ?? node;
  heading.setAttribute("tabindex", "-1");
  heading.focus({ preventScroll: true });
}

// ---- controls

let nControls = 0;

/** Build a labelled select. Options are texts or [value, text] pairs. */
function select(label, options, value, onChange, attributes = {}) {
  const id = `control-${(nControls += 1)}`;
  const node = el(
    "select",
    { id, ...attributes },
    options.map((option) => {
      const [key, text] = Array.isArray(option) ? option : [option, option];
      return el("option", { value: key, selected: String(key) === String(value) }, text);
    }),
  );
  node.onPick = onChange;
  node.addEventListener("change", () => node.onPick(node.value));
  return el("div", { class: "control" }, el("label", { for: id }, label), node);
}

function checkbox(label, checked, onChange, attributes = {}) {
  const id = `control-${(nControls += 1)}`;
  const node = el("input", { type: "checkbox", id, checked, ...attributes });
  node.onPick = onChange;
  node.addEventListener("change", () => node.onPick(node.checked));
  return el("div", { class: "control check" }, node, el("label", { for: id }, label));
}

const inputOf = (control) => $("select, input", control);
const controlName = (control) => {
  const { control: name, pick } = inputOf(control)?.dataset ?? {};
  return name ?? pick;
};

/** Give a control on the page the options, the value and the action of a fresh one. */
function patchControl(control, fresh) {
  const [node, model] = [inputOf(control), inputOf(fresh)];
  node.onPick = model.onPick;
  node.disabled = model.disabled;
  $("label", control).textContent = $("label", fresh).textContent;
  if (node.tagName === "SELECT") {
    const value = model.value;
    const texts = (list) =>
      JSON.stringify([...list.options].map((option) => [option.value, option.text]));
    if (texts(node) !== texts(model)) node.replaceChildren(...model.children);
    node.value = value;
  } else {
    node.checked = model.checked;
  }
}

/** Show controls in a box. Those that stay keep their elements, and with them the focus. */
function showControls(box, controls) {
  const old = [...box.children];
  const same =
    old.length === controls.length &&
    old.every((control, i) => controlName(control) === controlName(controls[i]));
  if (same) return old.forEach((control, i) => patchControl(control, controls[i]));
  const focused = box.contains(document.activeElement)
    ? controlName(document.activeElement.closest(".control"))
    : null;
  box.replaceChildren(...controls);
  const again = focused && controls.find((control) => controlName(control) === focused);
  return again && inputOf(again).focus();
}

/** The body of a section as a row of controls and a content box. */
function frame(body, controls) {
  let [box, content] = [$(":scope > .controls", body), $(":scope > .content", body)];
  if (!box) {
    box = el("div", { class: "controls" });
    content = el("div", { class: "content" });
    body.replaceChildren(box, content);
  }
  showControls(box, controls);
  box.hidden = controls.length === 0;
  return content;
}

const message = (...texts) => el("p", { class: "message" }, ...texts);

/** The first item of the combination that most items share: of a sweep under way, the fullest. */
function fullestItem(items, names, read) {
  const counts = new Map();
  const key = (item) => JSON.stringify(names.map((name) => read(item, name)));
  items.forEach((item) => counts.set(key(item), (counts.get(key(item)) ?? 0) + 1));
  const most = Math.max(...counts.values());
  return items.find((item) => counts.get(key(item)) === most);
}

/**
 * Selects that pick one item by its labels. A change to a combination that no item has moves the
 * other selects to the first item with the new value, so that there is always something to show.
 */
function picker(prefix, names, items, read, onPick, { all = [], labels = {} } = {}) {
  const at = (name) => `${prefix}.${name}`;
  const wanted = (name) => state.get(at(name));
  const fits = (item, list) =>
    list.every(
      (name) => !wanted(name) || wanted(name) === "*" || read(item, name) === wanted(name),
    );
  let current = names.some(wanted)
    ? items.find((item) => fits(item, names))
    : fullestItem(items, names, read);
  for (let n = names.length - 1; !current && n >= 0; n -= 1) {
    current = items.find((item) => fits(item, names.slice(0, n)));
  }
  const value = (name) =>
    wanted(name) === "*" && all.includes(name) ? "*" : current && read(current, name);
  const options = (name) => {
    const found = new Set(items.map((item) => read(item, name)));
    const known =
      name === "seed"
        ? [...found].sort((a, b) => a - b || (a > b) - (a < b))
        : labelsOf(name).filter((label) => found.has(label));
    return all.includes(name) ? [["*", "all"], ...known] : known;
  };
  const change = (name, label) => {
    const now = Object.fromEntries(names.map((other) => [other, value(other)]));
    now[name] = label;
    const matches = (item, other) => now[other] === "*" || read(item, other) === now[other];
    if (!items.some((item) => names.every((other) => matches(item, other)))) {
      const near = items
        .filter((item) => matches(item, name))
        .map((item) => [names.filter((other) => matches(item, other)).length, item])
        .sort((a, b) => b[0] - a[0])[0][1];
      names.forEach((other) => {
        if (now[other] !== "*") now[other] = read(near, other);
      });
    }
    names.forEach((other) => choose(at(other), now[other]));
    onPick();
  };
  const controls = names
    .filter((name) => options(name).length > 1)
    .map((name) =>
      select(labels[name] ?? name, options(name), value(name), (label) => change(name, label), {
        "data-pick": at(name),
      }),
    );
  const chosenItems = current
    ? items.filter((item) =>
        names.every((name) => value(name) === "*" || read(item, name) === value(name)),
      )
    : [];
  return {
    controls,
    current,
    items: chosenItems,
    isOne: names.every((name) => value(name) !== "*"),
  };
}
