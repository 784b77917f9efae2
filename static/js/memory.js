// The pool of pages, live: reads the messages of /api/memory/frames (docs/engine.md), keeps one byte a page, draws what
// changed. However fast messages come, it draws once a frame of the browser; a hidden tab reads nothing.

import { byId, number, page, say, showSlots, sleep } from "./frame.js";

const STATES = ["free", "cached", "used", "shared", "pinned", "pinned_in_use"];
const [FIGURES, WHOLE, CHANGES] = [0, 1, 2];
const SILENCE_MS = 8_000; // the server sends a sign of life every two seconds
const LONGEST_WAIT_MS = 4_000;
const CALM_MS = 500; // between two pictures for those who asked for less motion
const BAND = 8; // pages run down, then right, in bands of so many rows: what belongs together lies together
const ROOM = { narrow: 380, wide: 460 }; // css pixels of height that the map may take

const canvas = byId("pages");
const context = canvas.getContext("2d");
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const places = [...document.querySelectorAll("[data-figure]")];
let states = new Uint8Array(0);
let figures = {};
let grid = { columns: 0, rows: 0, pitch: 0, image: null, pixels: null, colours: [] };
let touched = null; // [first, last] of the pages to draw, null where there is none
let pointed = -1;

showSlots();
new ResizeObserver(lay).observe(canvas.parentElement);
for (const query of [matchMedia("(prefers-color-scheme: dark)"), matchMedia("(resolution)")]) query.addEventListener("change", lay);
byId("look").addEventListener("click", lay);
canvas.addEventListener("pointermove", (event) => point(at(event)));
canvas.addEventListener("pointerdown", (event) => point(at(event)));
canvas.addEventListener("pointerleave", () => point(-1));
canvas.addEventListener("blur", () => point(-1));
canvas.addEventListener("keydown", step);
follow();

// Reading

async function follow() {
  let wait = 250;
  for (;;) {
    if (document.hidden) await once(document, "visibilitychange");
    else {
      await read(() => (wait = 250)).catch(() => null);
      if (document.hidden) continue;
      tell({ away: true });
      await Promise.race([sleep(wait), once(window, "online")]);
      wait = Math.min(wait * 2, LONGEST_WAIT_MS);
    }
  }
}

async function read(opened) {
  const stop = new AbortController();
  const leave = () => document.hidden && stop.abort();
  document.addEventListener("visibilitychange", leave);
  let timer = setTimeout(() => stop.abort(), SILENCE_MS);
  try {
    const response = await fetch("/api/memory/frames", { signal: stop.signal });
    if (!response.ok) return;
    const reader = response.body.getReader();
    let buffer = new Uint8Array(0);
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      opened();
      clearTimeout(timer);
      timer = setTimeout(() => stop.abort(), SILENCE_MS);
      buffer = joined(buffer, value);
      buffer = await take(buffer);
    }
  } finally {
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", leave);
  }
}

/** Acts on the whole messages at the front of `buffer`; returns the rest. */
async function take(buffer) {
  for (;;) {
    if (buffer.length < 8) return buffer;
    const head = new DataView(buffer.buffer, buffer.byteOffset, 8);
    const end = 8 + head.getUint32(4, true);
    if (buffer.length < end) return buffer;
    const payload = buffer.slice(8, end);
    buffer = buffer.subarray(end);
    const kind = head.getUint32(0, true);
    if (kind === FIGURES) tell(JSON.parse(new TextDecoder().decode(payload)));
    else if (kind === WHOLE) replace(await inflated(payload));
    else if (kind === CHANGES) change(new DataView(payload.buffer));
  }
}

function joined(first, second) {
  if (!first.length) return second;
  const both = new Uint8Array(first.length + second.length);
  both.set(first);
  both.set(second, first.length);
  return both;
}

async function inflated(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function replace(all) {
  const isOther = all.length !== states.length;
  states = all;
  if (isOther) lay();
  else touch(0, states.length - 1);
}

function change(runs) {
  for (let at = 0; at < runs.byteLength; at += 8) {
    const first = runs.getUint32(at, true);
    const run = runs.getUint32(at + 4, true);
    states.fill(run & 7, first, first + (run >>> 3));
    touch(first, first + (run >>> 3) - 1);
  }
}

// Drawing

/** Makes the grid anew: as many columns as fill the width, squares as large as the room allows. */
function lay() {
  const ratio = devicePixelRatio || 1;
  const width = Math.floor(canvas.parentElement.clientWidth * ratio);
  if (!states.length || !width) return;
  const height = (innerWidth < 760 ? ROOM.narrow : ROOM.wide) * ratio;
  let pitch = Math.max(1, Math.min(Math.floor(Math.sqrt((width * height) / states.length)), 28 * ratio));
  pitch = Math.floor(pitch);
  while (pitch > 1 && bandsOf(Math.floor(width / pitch)) * BAND * pitch > height) pitch -= 1;
  const columns = Math.floor(width / pitch);
  const rows = bandsOf(columns) * BAND;
  canvas.width = columns * pitch;
  canvas.height = rows * pitch;
  canvas.style.width = `${canvas.width / ratio}px`;
  canvas.style.height = `${canvas.height / ratio}px`;
  const image = context.createImageData(canvas.width, canvas.height);
  grid = { columns, rows, pitch, ratio, image, pixels: new Uint32Array(image.data.buffer), colours: STATES.map(colourOf) };
  touched = [0, states.length - 1];
  draw();
}

const bandsOf = (columns) => Math.ceil(states.length / (columns * BAND));

/** Column and row of a page. */
function placeOf(index) {
  const inBand = index % (grid.columns * BAND);
  return [Math.floor(inBand / BAND), Math.floor(index / (grid.columns * BAND)) * BAND + (inBand % BAND)];
}

/** The colour of a state as the number that four bytes of an image are. */
function colourOf(state) {
  const probe = document.querySelector(`.legend [data-state="${state}"] .swatch`);
  const [red, green, blue] = getComputedStyle(probe).backgroundColor.match(/[\d.]+/g).map(Number);
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

let asked = false;
let drawnAt = 0;
function touch(first, last) {
  touched = touched ? [Math.min(touched[0], first), Math.max(touched[1], last)] : [first, last];
  if (asked) return;
  asked = true;
  const pause = calm.matches ? Math.max(0, drawnAt + CALM_MS - performance.now()) : 0;
  setTimeout(() => requestAnimationFrame(draw), pause);
}

function draw() {
  asked = false;
  if (!touched || !grid.image) return;
  const began = performance.now();
  const { columns, pitch, pixels, colours, image } = grid;
  const [firstBand, lastBand] = touched.map((index) => Math.floor(index / (columns * BAND)));
  touched = null;
  const width = columns * pitch;
  const filled = pitch > 3 ? pitch - 1 : pitch; // a gap between squares where there is room for one
  for (let row = firstBand * BAND; row < (lastBand + 1) * BAND; row += 1) {
    const top = row * pitch * width;
    let index = Math.floor(row / BAND) * columns * BAND + (row % BAND);
    for (let left = top; index < states.length && left < top + width; index += BAND, left += pitch) pixels.fill(colours[states[index]], left, left + filled);
    for (let line = 1; line < filled; line += 1) pixels.copyWithin(top + line * width, top, top + width);
  }
  context.putImageData(image, 0, 0, 0, firstBand * BAND * pitch, width, (lastBand - firstBand + 1) * BAND * pitch);
  mark();
  drawnAt = performance.now();
  canvas.dataset.frames = Number(canvas.dataset.frames ?? 0) + 1;
  canvas.dataset.drawMs = (drawnAt - began).toFixed(2);
}

// One page, in words

function at(event) {
  const box = canvas.getBoundingClientRect();
  const column = Math.floor(((event.clientX - box.left) * grid.ratio) / grid.pitch);
  const row = Math.floor(((event.clientY - box.top) * grid.ratio) / grid.pitch);
  if (column < 0 || column >= grid.columns || row < 0) return -1;
  return (Math.floor(row / BAND) * grid.columns + column) * BAND + (row % BAND);
}

function step(event) {
  const by = { ArrowUp: -1, ArrowDown: 1, ArrowLeft: -BAND, ArrowRight: BAND, Home: -Infinity, End: Infinity }[event.key];
  if (by === undefined || !states.length) return;
  event.preventDefault();
  point(Math.min(states.length - 1, Math.max(0, (pointed < 0 ? 0 : pointed) + (pointed < 0 && Math.abs(by) < Infinity ? 0 : by))));
}

function point(index) {
  const before = pointed;
  pointed = index >= 0 && index < states.length ? index : -1;
  if (before === pointed) return;
  if (before >= 0) touch(before, before);
  mark();
  byId("page-said").textContent = pointed < 0 ? say("memory_touch") : spoken(pointed);
}

const spoken = (index) => say("memory_page", { page: number.format(index * (figures.stride ?? 1)), state: say(`says_${STATES[states[index]]}`) });

/** A ring around the page that is pointed at. */
function mark() {
  if (pointed < 0) return;
  const { pitch, ratio } = grid;
  const [column, row] = placeOf(pointed);
  context.strokeStyle = getComputedStyle(canvas).color;
  context.lineWidth = 2 * ratio;
  const size = Math.max(pitch, 6 * ratio);
  context.strokeRect(column * pitch + (pitch - size) / 2, row * pitch + (pitch - size) / 2, size, size);
  touchSoon(pointed);
}

/** The ring leaves its neighbours painted over; the next picture draws their bands again. */
function touchSoon(index) {
  const first = Math.max(0, index - grid.columns * BAND);
  const last = Math.min(states.length - 1, index + grid.columns * BAND);
  touched = touched ? [Math.min(touched[0], first), Math.max(touched[1], last)] : [first, last];
}

// Numbers

function tell(fresh) {
  const isAway = Boolean(fresh.away);
  document.documentElement.dataset.memory = isAway ? "away" : fresh.pages ? "live" : "connecting";
  if (fresh.pages) figures = fresh;
  document.documentElement.toggleAttribute("data-estimated", Boolean(figures.estimated));
  const status = sentence(isAway);
  if (byId("memory-status").textContent !== status) byId("memory-status").textContent = status;
  if (!figures.pages) return;
  const shown = texts();
  for (const place of places) {
    const text = shown[place.dataset.figure] ?? "";
    if (place.textContent !== text) place.textContent = text;
  }
  for (const way of document.querySelectorAll(".way")) drawBar(way, figures.ways[way.dataset.way]);
  if (figures.models) listModels(figures.models);
}

function sentence(isAway) {
  if (isAway) return say("memory_away");
  if (!figures.pages) return say("memory_connecting");
  if (figures.estimated) return say("memory_estimated");
  if (figures.models) return say("memory_exact");
  if (figures.running + figures.waiting) return say("memory_live");
  return say(figures.pages.pinned + figures.pages.pinned_in_use ? "memory_idle" : "memory_empty");
}

function texts() {
  const { pages, ways, total, stride } = figures;
  const values = { total: number.format(total), size: bytes(figures.page_bytes), memory: bytes(total * figures.page_bytes), n: stride };
  const shown = {
    scale: say(stride > 1 ? "memory_scale_stride" : "memory_scale", values),
    served: number.format(figures.cached_tokens_served),
    running: number.format(figures.running),
    waiting: figures.waiting ? say("memory_waiting", { n: number.format(figures.waiting) }) : "",
  };
  for (const state of STATES) shown[`pages.${state}`] = number.format(pages[state]);
  for (const [name, way] of Object.entries(ways)) {
    shown[`${name}.pages`] = number.format(way.pages);
    shown[`${name}.waste`] = figures.running ? `${percent(way.waste_percent)}%` : "–";
    const fitsNone = way.more_battles === 0 && way.pages === 0; // the whole pool is free, and it is too small for one
    shown[`${name}.more`] = fitsNone ? say("memory_fits_none") : number.format(way.more_battles);
    shown[`${name}.says`] = figures.running
      ? say("way_says", { pages: number.format(way.pages), percent: percent((100 * way.pages) / total), waste: percent(way.waste_percent) })
      : say("way_nothing");
  }
  return shown;
}

function drawBar(element, way) {
  const share = figures.running ? way.pages / figures.total : 0;
  const shown = Math.min(share, 1) * 100;
  const filled = Math.min(shown, share * (100 - way.waste_percent));
  element.classList.toggle("over", share > 1);
  element.querySelector(".filled").style.width = `${filled}%`;
  element.querySelector(".empty").style.width = `${shown - filled}%`;
}

function listModels(models) {
  byId("memory-models").hidden = false;
  const rows = Object.entries(models).map(([name, model]) => {
    const row = document.createElement("tr");
    const cells = [name, ...["running", "tokens", "pages_used", "pages_pinned"].map((key) => number.format(model[key]))];
    row.append(...cells.map((text, index) => Object.assign(document.createElement(index ? "td" : "th"), { textContent: text })));
    return row;
  });
  document.querySelector("#memory-models tbody").replaceChildren(...rows);
}

const percent = (value) => new Intl.NumberFormat(page.language, { maximumFractionDigits: value < 10 ? 1 : 0 }).format(value);
const bytes = (count) => (count >= 2 ** 30 ? `${number.format(Math.round((count / 2 ** 30) * 10) / 10)} GiB` : count >= 2 ** 20 ? `${number.format(Math.round(count / 2 ** 20))} MiB` : `${number.format(count / 1024)} KiB`);
const once = (target, event) => new Promise((resolve) => target.addEventListener(event, resolve, { once: true }));
