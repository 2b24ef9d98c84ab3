// The figures of an ablation.

import { at, dataUrl, download, get } from "../api.js";
import { empty, h, replace } from "../dom.js";

const IMAGES = ["svg", "png"];

function figure(name, scale, each) {
  const url = (format) => at(["ablations", name, "figures", each.name], { scale, format });
  const image = h("img", { alt: each.title || each.name });
  const shown = IMAGES.find((format) => each.formats.includes(format));
  const place = h("div", { class: "picture" }, empty("Drawing …"));
  if (shown) {
    dataUrl(url(shown))
      .then((data) => {
        image.src = data;
        replace(place, image);
      })
      .catch((error) => replace(place, h("p", { class: "bad" }, error.message)));
  } else replace(place, empty("This figure is data only."));
  return h("figure", {},
    h("figcaption", {},
      h("b", {}, each.title || each.name),
      h("span", { class: "actions" },
        each.formats.map((format) =>
          h("button", {
              type: "button",
              class: "quiet",
              "aria-label": `${each.title || each.name} as ${format.toUpperCase()}`,
              onclick: () => download(url(format), `${name}_${each.name}.${format}`).catch((error) => alert(error.message)),
            },
            format.toUpperCase(),
          ),
        ),
      ),
    ),
    place,
  );
}

/** Draw the figures, and again when their list has changed. */
export async function figures(container, { name, scale, part }) {
  let list;
  try {
    list = await get(at(["ablations", name, "figures"], { scale }));
  } catch (error) {
    if (error.status !== 404 && error.status !== 409) throw error;
    part("other", `figures ${error.message}`, () => replace(container, empty(`There are no figures: ${error.message}`)));
    return;
  }
  part("other", `figures ${scale} ${JSON.stringify(list)}`, () =>
    replace(
      container,
      h("h2", { class: "hidden" }, "Figures"),
      list.length
        ? h("div", { class: "figures" },
            list.map((each) => figure(name, scale, each)),
          )
        : empty("There are no figures yet: they are drawn from finished runs."),
    ),
  );
}
