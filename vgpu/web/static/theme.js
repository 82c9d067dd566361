// Before the first paint: the colours that were chosen last time.
(() => {
  try {
    const chosen = localStorage.getItem("vgpu-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // A browser that keeps nothing shows what the system says.
  }
})();
