// What every page shares: its words, small DOM helpers, the look toggle, and putting our parts into Gradio's columns.

export const page = JSON.parse(document.getElementById("page-data").textContent);

/** The sentence of that key with its {names} filled in. */
export function say(key, values = {}) {
  return page.words[key].replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);
}

export const number = new Intl.NumberFormat(page.language);

/** An element: attributes, listeners (a function under "onclick" and the like), then children; strings are text. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

export const byId = (id) => document.getElementById(id);
export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** Resolves to the elements of these ids once Gradio has drawn them all, with the slots of the page moved in. */
export async function drawn(...ids) {
  while (!ids.every(byId)) await new Promise(requestAnimationFrame);
  for (const slot of document.querySelectorAll("#boot > .slot")) byId(slot.dataset.slot)?.replaceChildren(...slot.childNodes);
  byId("boot").remove();
  showSlots();
  return Object.fromEntries(ids.map((id) => [id, byId(id)]));
}

/** Where there is nothing to wait for: what the page brought is what is shown. */
export function showSlots() {
  document.documentElement.lang = page.language; // Gradio puts the browser's there
  document.documentElement.dataset.drawn = "";
}

/** Asks the server for a slot's HTML again and shows it where it has changed; the focus stays on its button. */
export async function refresh(slot) {
  const query = new URLSearchParams(location.search);
  query.set("part", slot.id);
  const response = await fetch(`${location.pathname}?${query}`).catch(() => null);
  if (!response?.ok) return;
  const fresh = document.createElement("template");
  fresh.innerHTML = await response.text();
  if (fresh.innerHTML === slot.dataset.shown) return;
  slot.dataset.shown = fresh.innerHTML;
  const focused = slot.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  slot.replaceChildren(fresh.content);
  if (focused) slot.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

/** Memory of this browser alone; works without it where storage is switched off. */
export const keep = {
  get(name) {
    try { return localStorage.getItem(`arena.${name}`); } catch { return null; }
  },
  set(name, value) {
    try { localStorage.setItem(`arena.${name}`, value); } catch { /* nothing is kept */ }
  },
};

function isDark() {
  const look = document.documentElement.dataset.look;
  return look ? look === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function labelLook(button) {
  button.setAttribute("aria-label", say(isDark() ? "theme_light" : "theme_dark"));
  button.title = button.getAttribute("aria-label");
}

document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest" }); // on a very narrow screen the items scroll

const look = byId("look");
labelLook(look);
look.addEventListener("click", () => {
  document.documentElement.dataset.look = isDark() ? "light" : "dark";
  keep.set("look", document.documentElement.dataset.look);
  labelLook(look);
});
