// The two answers. A panel draws what the server rendered, block by block, and knows nothing of votes or names until told.

import { el, say } from "./frame.js";

const NEAR_END_PX = 60;
const LONG_QUESTION = 400;

export class Panel {
  /** `root` is the column that Gradio drew; `retry(side)` is called when the visitor wants this answer again. */
  constructor(root, side, retry) {
    Object.assign(this, { root, side, retry, turns: new Map(), follows: true, top: 0 });
    this.title = el("h2", {}, say(`model_${side}`));
    this.note = el("span", { class: "panel-note" });
    this.tag = el("span", { class: "panel-choice", hidden: true });
    this.scroll = el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": say(`model_${side}`) });
    this.end = el("button", { type: "button", class: "to-end", hidden: true, "aria-label": say("to_end"), onclick: () => this.toEnd() });
    this.scroll.addEventListener("scroll", () => this.notice(), { passive: true });
    new ResizeObserver(() => this.resized()).observe(this.scroll); // the vote bar and the names take their room from here
    root.replaceChildren(
      el("header", { class: "panel-head" }, el("span", { class: "badge", "aria-hidden": "true" }, side.toUpperCase()), this.title, this.tag, this.note),
      this.scroll,
      this.end,
    );
    root.setAttribute("role", "region");
    root.setAttribute("aria-label", say(`model_${side}`));
  }

  clear() {
    this.turns.clear();
    this.scroll.replaceChildren();
    Object.assign(this, { follows: true, top: 0 });
    this.reveal(null, false);
    this.mark("");
  }

  /** Shows the question of a turn and an empty answer below it, or the turn's parts if it is there. */
  turn(number, prompt = "") {
    if (this.turns.has(number)) return this.turns.get(number);
    const blocks = el("div", { class: "blocks", dir: "auto" });
    const after = el("div", { class: "after" });
    const answer = el("div", { class: "answer", "aria-live": "polite", "aria-busy": "true" }, blocks, after);
    this.scroll.append(el("article", { class: "turn" }, question(prompt), answer));
    const turn = { blocks, after, answer };
    this.turns.set(number, turn);
    this.goToEnd();
    return turn;
  }

  /** Empties the answer of a turn: it begins, or begins again. */
  begin(number) {
    this.turn(number).blocks.replaceChildren();
    this.state(number, "streaming");
  }

  /** A whole answer as the server has it now. */
  answer(number, { state, blocks }) {
    this.turn(number).blocks.replaceChildren();
    blocks.forEach((html, index) => this.block(number, index, html));
    this.state(number, state);
  }

  /** `html` comes from the server's renderer, which lets no markup of the model through. */
  block(number, index, html) {
    const { blocks } = this.turn(number);
    while (blocks.children.length <= index) blocks.append(el("div", { class: "block" }));
    const block = blocks.children[index];
    block.innerHTML = html;
    for (const code of block.querySelectorAll("pre")) code.replaceWith(framed(code.cloneNode(true)));
    for (const table of block.querySelectorAll("table")) table.replaceWith(el("div", { class: "table", tabindex: "0" }, table.cloneNode(true)));
    this.keepUp();
  }

  state(number, state) {
    const { answer, after, blocks } = this.turn(number);
    answer.dataset.state = state;
    answer.setAttribute("aria-busy", String(state === "streaming"));
    after.replaceChildren(...this.aftermath(state, blocks));
    this.mark(state);
    this.keepUp();
  }

  aftermath(state, blocks) {
    if (state === "streaming") return [];
    if (state === "done") return blocks.textContent.trim() ? [copyButton("copy", () => blocks.innerText)] : [el("p", { class: "missing" }, say("side_empty"))];
    const parts = [el("p", { class: "missing" }, say(`side_${state}_message`))];
    if (state === "failed") parts.push(el("button", { type: "button", class: "retry primary", onclick: () => this.retry(this.side) }, say("retry")));
    return parts;
  }

  mark(state) {
    this.root.dataset.state = state;
    this.note.textContent = state ? say(`side_${state}`) : "";
  }

  /** The model's name instead of A or B; null hides it again. */
  reveal(name, chosen) {
    const title = name ?? say(`model_${this.side}`);
    this.title.textContent = title;
    this.title.title = title;
    this.scroll.setAttribute("aria-label", title);
    this.root.setAttribute("aria-label", title);
    this.root.toggleAttribute("data-revealed", name !== null);
    this.root.toggleAttribute("data-chosen", chosen);
    this.tag.hidden = !chosen;
    this.tag.textContent = chosen ? say("your_choice") : "";
  }

  // Follows the newest words until the reader scrolls up, and again once the reader is back at the end.

  notice() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroll;
    const isUp = scrollTop < this.top; // else it is the panel that became smaller, not the reader who scrolled
    this.top = scrollTop;
    this.follows = scrollHeight - scrollTop - clientHeight < NEAR_END_PX || (this.follows && !isUp);
    this.end.hidden = this.follows;
  }

  resized() {
    if (this.follows) this.keepUp();
    else this.notice();
  }

  keepUp() {
    this.notice(); // of a scroll the browser may not have told yet
    if (this.follows) this.goToEnd();
  }

  goToEnd() {
    this.follows = true;
    this.scroll.scrollTop = this.scroll.scrollHeight;
    this.top = this.scroll.scrollTop;
    this.end.hidden = true;
  }

  toEnd() {
    this.goToEnd();
    this.scroll.focus({ preventScroll: true });
  }
}

function question(prompt) {
  const text = el("div", { class: "question-text", dir: "auto" }, prompt);
  const box = el("div", { class: "question" }, el("span", { class: "sr" }, `${say("you")}: `), text);
  if (prompt.length > LONG_QUESTION) {
    box.classList.add("long");
    const more = el("button", { type: "button", class: "more", "aria-expanded": "false" }, say("more"));
    more.addEventListener("click", () => {
      const open = box.classList.toggle("open");
      more.textContent = say(open ? "less" : "more");
      more.setAttribute("aria-expanded", String(open));
    });
    box.append(more);
  }
  return box;
}

function framed(pre) {
  pre.tabIndex = 0;
  const language = el("span", {}, pre.dataset.language || "");
  return el("div", { class: "code" }, el("div", { class: "code-head" }, language, copyButton("copy_code", () => pre.textContent)), pre);
}

function copyButton(label, text) {
  const button = el("button", { type: "button", class: "copy", "aria-label": say(label) }, say("copy"));
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
    } catch {
      copyBySelection(text());
    }
    button.textContent = say("copied");
    setTimeout(() => (button.textContent = say("copy")), 1500);
  });
  return button;
}

/** Where the page is not served over https the clipboard is closed to scripts, but not to a selection. */
function copyBySelection(text) {
  const area = el("textarea", { class: "sr", readonly: true });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
