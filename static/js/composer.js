// The question box: Enter sends, Shift + Enter breaks the line, and a counter says before sending what is too long.

import { call } from "./api.js";
import { el, number, say } from "./frame.js";

const COUNT_AFTER_MS = 250;
const VERY_LONG = 100_000; // characters, more than any context takes: wrapping lines would freeze the page from here on
const MOST_LINES = 20_000; // a box that holds more takes a browser minutes to draw
const MANY_LINES = 1_000; // from here on dir="auto" is costly: a browser takes the square of their number to draw them

export class Composer {
  constructor({ prompt, counter, send, stop }, { onSend, onStop, battle }) {
    this.area = prompt.querySelector("textarea");
    this.counter = el("p", { id: "counter-text", role: "status" });
    this.keys = el("p", { class: "keys" }, say("prompt_keys"));
    counter.replaceChildren(this.counter, this.keys);
    Object.assign(this, { send, stop, onSend, battle, fits: true, counting: null });
    this.area.setAttribute("aria-describedby", "counter-text");
    this.area.setAttribute("enterkeyhint", "send");
    this.area.dir = "auto";
    this.area.addEventListener("input", () => this.changed());
    this.area.addEventListener("paste", (event) => this.paste(event));
    this.area.addEventListener("keydown", (event) => this.key(event), { capture: true });
    send.classList.add("empty");
    send.addEventListener("click", () => this.submit());
    stop.addEventListener("click", () => onStop());
  }

  get text() {
    return this.area.value;
  }

  set text(value) {
    this.area.value = value;
    this.area.dispatchEvent(new Event("input", { bubbles: true }));
  }

  say(placeholder) {
    this.area.placeholder = placeholder;
  }

  focus() {
    this.area.focus({ preventScroll: true });
  }

  key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
    event.preventDefault();
    event.stopPropagation();
    this.submit();
  }

  /** What no browser can draw is refused before it is in the box. */
  paste(event) {
    const text = event.clipboardData?.getData("text/plain") ?? "";
    if (text.split("\n", MOST_LINES).length < MOST_LINES) return;
    event.preventDefault();
    this.show(say("too_many_lines", { lines: number.format(MOST_LINES) }), true);
  }

  submit() {
    if (!this.text.trim()) return this.focus();
    if (this.fits) this.onSend(this.text);
  }

  /** A refusal of the server is about the text until the text changes. */
  refuse(sentence) {
    this.show(sentence, true);
  }

  changed() {
    const isVeryLong = this.text.length > VERY_LONG;
    this.area.classList.toggle("very-long", isVeryLong);
    this.area.dir = this.text.split("\n", MANY_LINES).length < MANY_LINES ? "auto" : "ltr";
    clearTimeout(this.timer);
    this.counting?.abort();
    this.send.classList.toggle("empty", !this.text.trim());
    if (!this.text.trim()) return this.show("", false);
    this.fits = !isVeryLong; // until it is counted: nothing is sent that must be refused
    this.timer = setTimeout(() => this.count(), isVeryLong ? 0 : COUNT_AFTER_MS);
  }

  async count() {
    this.counting = new AbortController();
    try {
      const { tokens, limit, ok } = await call("POST", "/count", { prompt: this.text, battle: this.battle() }, this.counting);
      const numbers = { tokens: number.format(tokens), limit: number.format(limit) };
      this.show(say(ok ? "tokens" : "tokens_over", numbers), !ok);
    } catch (error) {
      if (error.name !== "AbortError") this.show(error.status >= 400 && error.status < 500 ? error.message : "", error.status === 413);
    }
  }

  show(sentence, over) {
    this.fits = !over;
    this.counter.textContent = sentence;
    this.counter.classList.toggle("over", over);
    this.area.setAttribute("aria-invalid", String(over));
    this.send.disabled = over;
  }
}
