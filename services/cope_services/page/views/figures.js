// The figures of an ablation.

import { at, dataUrl, download, get } from "../api.js";
import { empty, h, replace } from "../dom.js";
import { begun } from "../status.js";

const IMAGES = ["svg", "png"]; // the first of them that there is
const INCH = 108; // pixels: 8 points of a figure are 12 pixels, in every figure
const MOST_ROWS = 24; // whose curves are drawn unasked: of more, a panel takes seconds and cannot be read
const COLOURED = ["heatmap", "maps"]; // their colours are values, so they are as printed, also in the dark

/** The width of a figure for a place on the page, in quarters of an inch: the server draws panels for it. */
const widthFor = (place) => Math.max(2, Math.min(39, Math.floor((place.clientWidth / INCH) * 4) / 4));

/** A picture in the scale of all others; a drawing that is wider than its place is smaller. */
const picture = (alt, src) =>
  h("img", { alt, src, onload: ({ target }) => target.style.setProperty("width", `${(target.naturalWidth * INCH) / 96}px`) });

/** A figure with its title, buttons of its formats, and a place for its picture. */
function figure({ name, title, kind, formats }, file, url) {
  const text = title || name;
  const button = (format) => {
    const save = () => download(url(format), `${file}.${format}`);
    const label = format.toUpperCase();
    return h("button", { type: "button", class: "quiet", "aria-label": `${text} as ${label}`, onclick: save }, label);
  };
  const coloured = COLOURED.includes(kind);
  const place = h("div", { class: coloured ? "picture printed" : "picture" }, empty("Drawing …"));
  const caption = h("figcaption", {}, h("b", {}, text), h("span", { class: "actions" }, formats.map(button)));
  return { node: h("figure", { class: coloured ? "wide" : null }, caption, place), place, text, format: IMAGES.find((each) => formats.includes(each)) };
}

/** Ask for one picture after another: the server takes seconds to draw one. */
async function fill(figures, url) {
  for (const [i, { place, text, format }] of figures.entries()) {
    if (!place.isConnected) return; // another view or tab has been opened
    try {
      replace(place, format ? picture(text, await dataUrl(url(i, format, widthFor(place)))) : empty("This figure is data only."));
    } catch (error) {
      replace(place, empty(error.message));
    }
  }
}

/** Draw the figures, and again when their list or the finished runs have changed. */
export async function figures(container, { name, scale, sets, counts, rows, committed, part }) {
  const list = await get(at(["ablations", name, "figures"], { scale, set: sets })).catch((error) => error);
  if (list instanceof Error && ![404, 409].includes(list.status)) throw list;
  part("other", `figures ${scale} ${sets} ${counts.finished} ${list.message ?? JSON.stringify(list)}`, () => {
    if (list instanceof Error || !list.length || !(begun(counts) || committed)) {
      replace(container, empty(list.message ?? "There are no figures yet: they are drawn from finished runs."));
      return;
    }
    const url = (figure, format, size) => at(["ablations", name, "figures", figure.name], { scale, set: sets, format, size, committed });
    const draw = (some) => some.map((each) => figure(each, `${name}_${each.name}`, (format) => url(each, format)));
    const isFirst = ({ declared, kind }) =>
      declared || (kind === "curves" && rows <= MOST_ROWS) || (kind === "summary" && !list.some((each) => each.declared));
    const [first, others] = [list.filter(isFirst), list.filter((each) => !isFirst(each))];
    const made = draw(first);
    // Each takes the server seconds: those that the file does not declare are drawn when somebody opens them.
    const onDemand = (each) => {
      const [one] = draw([each]);
      let asked = false;
      const open = () => {
        if (!asked) fill([one], (_, format, size) => url(each, format, size));
        asked = true;
      };
      return h("details", { ontoggle: open }, h("summary", {}, one.text), h("div", { class: "figures" }, one.node));
    };
    replace(container,
      h("h2", { class: "hidden" }, "Figures"),
      h("div", { class: "figures" }, made.map((each) => each.node)),
      others.length > 0 && [h("h3", {}, "More figures"), others.map(onDemand)],
    );
    fill(made, (i, format, size) => url(first[i], format, size));
  });
}
