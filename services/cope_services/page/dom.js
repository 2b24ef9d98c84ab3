// Creates and replaces elements of the page.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "path", "rect"]);
const isShown = (value) => value !== null && value !== undefined && value !== false;

/**
 * An element: h("a", {href: "#/"}, "text", child). `onclick: f` adds a listener, `style: {color: "red"}` sets single
 * properties (a style attribute would be refused by the content security policy), null and false leave an attribute out.
 */
export function h(tag, attributes = {}, ...children) {
  const node = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (!isShown(value)) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) node.style.setProperty(key, each);
    else if (name === "value" || name === "checked" || name === "indeterminate") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(3).filter(isShown));
  return node;
}

/** Replace the children of `container`. The focus returns to the element with the same `data-key`, if there is one. */
export function replace(container, ...children) {
  const key = container.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  const scrolled = container.scrollLeft;
  container.replaceChildren(...children.flat(3).filter(isShown));
  container.scrollLeft = scrolled;
  if (key !== undefined) container.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
}

/** A function that draws only if its key differs from the key of the last call. */
export function changes() {
  const drawn = new Map();
  return (part, key, draw) => {
    if (drawn.get(part) === key) return;
    drawn.set(part, key);
    draw();
  };
}

/** A drop-down list with a label. `options` are values or [value, text]. */
export function select(label, options, value, onchange, attributes = {}) {
  const items = options.map((each) => (Array.isArray(each) ? each : [each, each]));
  return h("label", { class: "field" },
    h("span", {}, label),
    h("select", { "data-key": label, onchange: (event) => onchange(event.target.value), ...attributes },
      items.map(([key, text]) => new Option(text, key, key === value, key === value)),
    ),
  );
}

/** A check box with a label. */
export function checkbox(label, checked, onchange, key = label) {
  return h("label", { class: "check" },
    h("input", { type: "checkbox", checked, "data-key": key, onchange: (event) => onchange(event.target.checked) }),
    h("span", {}, label),
  );
}

/** A field for words; `where` says where they are searched. A view makes it once: it is typed in while the view changes. */
export const searchField = (label, where, onchange) =>
  h("input", {
    type: "search",
    placeholder: label,
    title: `Words in: ${where}`,
    "aria-label": label,
    "data-key": "search",
    oninput: (event) => onchange(event.target.value),
  });

/** A list of buttons, one of them pressed: [[value, text], …]. */
export function segmented(label, options, value, onchange) {
  return h("div", { class: "segmented", role: "group", "aria-label": label },
    options.map(([key, text, title]) =>
      h("button", {
          type: "button",
          "aria-pressed": String(key === value),
          "data-key": `${label} ${key}`,
          title,
          onclick: () => onchange(key),
        },
        text,
      ),
    ),
  );
}

/** A section with a heading, controls beside it, and a body. */
export function section(title, { id, level = 2, controls = [] } = {}, ...body) {
  return h("section", { "aria-labelledby": id }, h("div", { class: "bar" }, h(`h${level}`, { id }, title), controls), body);
}

/** A sentence with its `words in backticks` as code. */
export const marked = (text) => text.split(/`([^`]+)`/).map((part, i) => (i % 2 ? h("code", {}, part) : part));

/** A sentence instead of missing content, with what to do next. */
export const empty = (text) => h("p", { class: "empty" }, marked(text));

/** A table that can be scrolled, by keyboard, too. */
export const scrolling = (label, table) => h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, table);

/** Two columns: names and values. */
export function definitions(pairs) {
  return h("dl", { class: "facts" },
    pairs
      .filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  );
}

/**
 * A table with a header row. `columns` are names or [name, class]; a row is a list of cells, of which the first is the
 * header of the row.
 */
export function table(label, columns, rows, attributes = {}) {
  const heads = columns.map((each) => (Array.isArray(each) ? each : [each, null]));
  const head = heads.map(([text, kind]) => h(text ? "th" : "td", { scope: text ? "col" : null, class: kind }, text));
  const line = (cells) => cells.map((cell, i) => (i ? h("td", { class: heads[i][1] }, cell) : h("th", { scope: "row" }, cell)));
  const body = rows.map((cells) => h("tr", {}, line(cells)));
  return scrolling(label, h("table", attributes, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)));
}

/** The pages of a view, as links; the address has the parameter `tab` except for the first one. */
export function tabs(label, pages, shown, onchange) {
  const page = ([key, text], i) => {
    const onclick = (event) => {
      event.preventDefault();
      onchange(i ? key : null);
    };
    return h("a", { href: "#", "data-key": `tab ${key}`, "aria-current": key === shown && "page", onclick }, text);
  };
  return h("nav", { class: "tabs", "aria-label": label }, pages.map(page));
}

export const LEVELS = 9; // colours of a scale

/** A scale of colours, those of the classes prefix0 … prefix8, between texts for the least and the most. */
export const colourScale = (prefix, least, most) =>
  h("div", { class: "scale", role: "img", "aria-label": `Colours from ${least}, to ${most}` },
    h("span", {}, least),
    h("span", { class: "steps" }, Array.from({ length: LEVELS }, (_, i) => h("i", { class: `${prefix}${i}` }))),
    h("span", {}, most),
  );

/** The path to a view: [[text, address], …, text]. */
export const crumbs = (...parts) =>
  h("nav", { class: "crumbs", "aria-label": "Path" },
    parts.flatMap((part, i) => [
      i ? " / " : null,
      Array.isArray(part) ? h("a", { href: part[1] }, part[0]) : h("span", { class: "mono" }, part),
    ]),
  );
