// Under the pointer: a cell's value, and the tokens as that query's gates see them.
const labels = JSON.parse(document.getElementById("labels").textContent);
const tip = document.getElementById("tip");
const T = labels.length;
const shown = (t) => `${t} ${JSON.stringify(labels[t])}`;

function valuesOf(image) {
  const bytes = Uint8Array.from(atob(image.dataset.cells), (c) => c.charCodeAt(0));
  const steps = new Uint16Array(bytes.buffer);
  const scale = Number(image.dataset.scale) / 65535;
  return (i, j) => steps[(i * (i + 1)) / 2 + j] * scale;
}

for (const section of document.querySelectorAll("section")) {
  const images = [...section.querySelectorAll("image")];
  const spans = [...section.querySelectorAll(".tokens span")];
  const means = spans.map((span) => span.style.getPropertyValue("--gate"));
  let gates = null;

  const shade = (query) => {
    spans.forEach((span, t) => {
      span.style.setProperty("--gate", query === null ? means[t] : t > query ? 0 : gates(query, t));
      span.classList.toggle("after", query !== null && t > query);
      span.classList.toggle("query", t === query);
    });
  };
  for (const image of images) {
    let value = null;
    image.addEventListener("pointermove", (event) => {
      value ??= valuesOf(image);
      gates ??= spans.length ? valuesOf(images[0]) : null;
      const box = image.getBoundingClientRect();
      const i = Math.min(T - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * T)));
      const j = Math.min(T - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * T)));
      tip.hidden = j > i;
      tip.textContent = `query ${shown(i)}\nkey   ${shown(j)}\n${image.dataset.symbol} = ${value(i, j).toPrecision(4)}`;
      tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
      tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
      if (gates) shade(i);
    });
    image.addEventListener("pointerleave", () => {
      tip.hidden = true;
      shade(null);
    });
  }
}
