// A colour for each vGPU of a GPU: neighbours far apart on the wheel, equally light. Words always stand beside it.

const GOLDEN = 137.508;

export const hueOf = (place) => Math.round((172 + place * GOLDEN) % 360);

const system = matchMedia("(prefers-color-scheme: dark)");

export function dark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : system.matches;
}

// The same two as in style.css, for canvases.
export const solid = (hue) => (dark() ? `oklch(0.74 0.12 ${hue})` : `oklch(0.6 0.125 ${hue})`);
