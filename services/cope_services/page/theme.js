// The theme: the system's, unless the button has chosen the other one. It is loaded before anything is drawn.

(() => {
  const KEY = "cope-sweep-theme";
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const system = () => (dark.matches ? "dark" : "light");
  const shown = () => localStorage.getItem(KEY) ?? system();

  function show() {
    document.documentElement.dataset.theme = shown();
    dispatchEvent(new Event("themechange"));
  }

  addEventListener("click", (event) => {
    if (event.target.id !== "theme") return;
    const other = shown() === "dark" ? "light" : "dark";
    if (other === system()) localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, other);
    show();
  });
  dark.addEventListener("change", show);
  show();
})();
