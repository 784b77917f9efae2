// The arena: one battle at a time, from the question to the names. The server decides; this only shows and asks.
//
// What is visible in which state is decided by arena.css from <html data-battle="...">: idle, sending, streaming,
// votable, voting, voted, interrupted, void.

import { call } from "./api.js";
import { Composer } from "./composer.js";
import { follow } from "./events.js";
import { byId, drawn, el, keep, number, page, say, sleep } from "./frame.js";
import { Panel } from "./panels.js";

const SIDES = ["a", "b"];
const VOTES = { "vote-a": "a", "vote-tie": "tie", "vote-bad": "both_bad", "vote-b": "b" };
const STATUS_EVERY_MS = 3_000;
const EVENT_IDS_PER_ATTEMPT = 100_000; // as in app/battles.py: the ids of events tell how often was answered

const battle = { id: null, turn: 0, state: "idle", event: 0, prompts: [], following: null };
let panels, composer, parts;
let noticed = false;

const shown = drawn("hero", "side-tabs", "panels", "chat-a", "chat-b", "dock", "reveal", "banner", "vote-bar", "battle-tools", ...Object.keys(VOTES),
  "regenerate", "new-battle", "notice", "composer", "prompt", "counter", "send", "stop").then(connect);
start();

/** Asks for the battle of this visitor at once: nobody reading it for two seconds would end it while Gradio starts. */
async function start() {
  const ask = (path) => call("GET", path).catch(() => null);
  const [current, status, notice] = await Promise.all([ask("/battles/current"), ask("/status"), ask("/notice")]);
  const snapshot = current && current.battle !== keep.get("left") ? await ask(`/battles/${current.battle}`) : null;
  if (snapshot) Object.assign(battle, { id: snapshot.battle, event: snapshot.last_event_id });
  if (snapshot?.state === "streaming") listen();
  await shown;
  noticed = Boolean(notice?.accepted);
  if (snapshot) draw(snapshot);
  else show("idle");
  if (!noticed) showNotice();
  watchStatus(status);
}

function connect(drawnParts) {
  parts = drawnParts;
  panels = Object.fromEntries(SIDES.map((side) => [side, new Panel(parts[`chat-${side}`], side, retry)]));
  composer = new Composer(parts, { onSend: send, onStop: stop, battle: () => (["votable", "streaming"].includes(battle.state) ? battle.id : null) });
  for (const [id, kind] of Object.entries(VOTES)) parts[id].addEventListener("click", () => vote(kind));
  for (const example of document.querySelectorAll("#hero .example")) example.addEventListener("click", () => useExample(example.textContent));
  parts["vote-bar"].setAttribute("role", "group");
  parts["vote-bar"].setAttribute("aria-label", say("vote_question"));
  parts["vote-bar"].prepend(el("p", { class: "vote-title" }, say("vote_question"), el("span", { class: "vote-keys" }, say("vote_keys"))));
  parts["battle-tools"].append(el("button", { type: "button", id: "rematch", class: "quiet", onclick: rematch }, say("rematch")));
  parts.regenerate.addEventListener("click", regenerate);
  parts["new-battle"].addEventListener("click", newBattle);
  parts.banner.setAttribute("role", "status");
  document.addEventListener("keydown", voteByKey);
  document.addEventListener("visibilitychange", catchUp);
  addEventListener("focus", catchUp);
  tabs();
}

// What is shown

function show(state) {
  battle.state = state;
  document.documentElement.dataset.battle = state;
  composer.say(say({ streaming: "prompt_waiting", sending: "prompt_waiting", votable: "prompt_follow", interrupted: "prompt_new", void: "prompt_new", voted: "prompt_new" }[state] ?? "prompt_first"));
}

function banner(sentence, kind = "info") {
  parts.banner.replaceChildren(...(sentence ? [el("p", { class: `note ${kind}` }, sentence)] : []));
}

function fresh() {
  battle.following?.abort();
  Object.assign(battle, { id: null, turn: 0, event: 0, prompts: [], following: null });
  for (const side of SIDES) panels[side].clear();
  nameTabs({});
  parts.reveal.replaceChildren();
  banner("");
}

function addTurn(turn, prompt) {
  battle.turn = turn;
  battle.prompts[turn - 1] = prompt;
  for (const side of SIDES) {
    panels[side].turn(turn, prompt);
    panels[side].begin(turn);
  }
}

/** Draws a battle as the server has it; what was shown before stays what it was. */
function draw(snapshot) {
  battle.id = snapshot.battle;
  battle.event = snapshot.last_event_id;
  for (const { number: turn, prompt, answers } of snapshot.turns) {
    battle.turn = turn;
    battle.prompts[turn - 1] = prompt;
    for (const side of SIDES) {
      panels[side].turn(turn, prompt);
      panels[side].answer(turn, answers[side]);
    }
  }
  show(snapshot.state);
  if (snapshot.models) reveal({ ...snapshot, kind: snapshot.vote });
  if (snapshot.state === "interrupted" || snapshot.state === "void") explain();
}

/** Why there is nothing to vote on, and what can be done. */
function explain() {
  if (battle.state === "void") return banner(say("battle_void"));
  const ended = (state) => SIDES.filter((side) => parts[`chat-${side}`].dataset.state === state);
  const failed = ended("failed");
  if (failed.length === 1) return banner(say("battle_failed", { side: say(`model_${failed[0]}`) }));
  const stopped = ended("stopped");
  banner(say(failed.length ? "battle_failed_both" : stopped.length ? "battle_stopped" : "battle_interrupted"));
}

// What the visitor does

async function send(prompt) {
  if (["sending", "streaming", "voting"].includes(battle.state)) return;
  if (!noticed) return showNotice(() => send(prompt));
  const goesOn = battle.id && battle.state === "votable";
  const before = battle.state;
  show("sending");
  try {
    const { battle: id, turn } = await call("POST", goesOn ? `/battles/${battle.id}/turns` : "/battles", { prompt });
    if (!goesOn) fresh();
    banner("");
    composer.text = "";
    battle.id = id;
    if (matchMedia("(pointer: coarse)").matches) composer.area.blur(); // the keyboard would cover the answers
    if (turn !== battle.turn + 1) return reload(id);
    addTurn(turn, prompt);
    show("streaming");
    listen();
  } catch (error) {
    show(before);
    if (error.code === "notice_required") return showNotice(() => send(prompt));
    if (error.status === 400 || error.status === 413) composer.refuse(error.message);
    else await refused(error, "send_failed");
  }
}

async function stop() {
  if (battle.state === "streaming") await attempt(`/battles/${battle.id}/stop`);
}

async function regenerate() {
  if (!["votable", "interrupted"].includes(battle.state)) return;
  await answerAgain(`/battles/${battle.id}/regenerate`, SIDES);
}

async function retry(side) {
  if (battle.state !== "streaming") await answerAgain(`/battles/${battle.id}/sides/${side}/retry`, [side]);
}

async function answerAgain(path, sides) {
  const before = battle.state;
  show("sending");
  const begun = await attempt(path);
  if (!begun) return show(battle.state === "sending" ? before : battle.state);
  banner("");
  if (begun.turn !== battle.turn) return reload(battle.id); // another tab has asked meanwhile
  for (const side of sides) panels[side].begin(battle.turn);
  show("streaming");
  listen();
}

async function attempt(path) {
  try {
    return await call("POST", path);
  } catch (error) {
    await refused(error, "went_wrong");
    return null;
  }
}

/** Says what the server refused, and shows the battle as it has it: another tab may have gone on. */
async function refused(error, otherwise) {
  if (battle.id && (error.status === 404 || error.status === 409)) await reload(battle.id);
  banner(error.message || say(otherwise), "bad");
  if (error.code === "not_ready") lookAtStatus();
}

function newBattle() {
  if (battle.id && battle.state === "streaming") call("POST", `/battles/${battle.id}/stop`).catch(() => {});
  if (battle.id) keep.set("left", battle.id);
  fresh();
  show("idle");
  composer.focus();
  lookAtStatus();
}

function rematch() {
  send(battle.prompts[0]);
}

function useExample(text) {
  composer.text = text;
  composer.focus();
  send(text);
}

// The vote

async function vote(kind) {
  if (battle.state !== "votable") return;
  show("voting");
  try {
    const revealed = await call("POST", `/battles/${battle.id}/vote`, { kind });
    show("voted");
    reveal(revealed);
    byId("new-battle").focus({ preventScroll: true });
    lookAtStatus();
  } catch (error) {
    show("votable");
    await refused(error, "vote_failed");
    if (error.status >= 500 || error.status === 0) banner(say("vote_failed"), "bad");
  }
}

function voteByKey(event) {
  const typing = event.target.closest?.("textarea, input, select, [contenteditable]");
  const place = ["Digit1", "Digit2", "Digit3", "Digit4"].indexOf(event.code);
  if (place < 0 || battle.state !== "votable" || event.ctrlKey || event.metaKey || event.shiftKey || event.isComposing) return;
  if (typing && !event.altKey) return;
  event.preventDefault();
  vote(Object.values(VOTES)[place]);
}

function reveal({ kind, models, counted, reason }) {
  for (const side of SIDES) panels[side].reveal(models[side], kind === side);
  nameTabs(models);
  banner("");
  parts.reveal.setAttribute("role", "status");
  parts.reveal.replaceChildren(
    el("div", { class: "reveal-card" },
      el("p", { class: "verdict" }, say(`voted_${kind}`, models)),
      el("p", { class: "names" }, ...SIDES.map((side) => el("span", { class: `name side-${side}` }, el("b", {}, say(`model_${side}`)), ` ${say("was")} `, el("strong", {}, models[side])))),
      el("p", { class: "thanks" }, counted ? say("thanks") : `${say("thanks_not_counted")} ${say(`reason_${reason}`)}`, " ", el("a", { href: "/leaderboard" }, say("to_leaderboard"))),
    ),
  );
}

// The stream

function listen() {
  battle.following?.abort();
  const following = (battle.following = new AbortController());
  follow(battle.id, battle.event, {
    signal: following.signal,
    handle: (type, data, id) => shown.then(() => following.signal.aborted || heard(type, data, id)),
    lost: () => shown.then(() => banner(say("connection_lost"), "bad")),
    back: () => shown.then(() => banner("")),
  }).then(
    (whole) => whole || following.signal.aborted || reload(battle.id),
    (error) => following.signal.aborted || refused(error, "went_wrong"),
  );
}

function heard(type, data, id) {
  battle.event = id;
  if (type === "block") panels[data.side].block(data.turn, data.block, data.html);
  if (type === "side" && data.state === "streaming") panels[data.side].begin(data.turn);
  else if (type === "side") panels[data.side].state(data.turn, data.state);
  if (type === "state" && data.state !== battle.state) {
    show(data.state);
    if (data.state !== "streaming") banner("");
    if (data.state === "interrupted" || data.state === "void") explain();
  }
}

async function reload(id) {
  try {
    const snapshot = await call("GET", `/battles/${id}`);
    if (battle.id !== id) return; // the visitor has gone on meanwhile
    draw(snapshot);
    if (snapshot.state === "streaming") listen();
  } catch (error) {
    if (error.status !== 404 || battle.id !== id) return;
    fresh();
    show("idle");
  }
}

/** What another tab has done to this battle meanwhile: its vote, another question, the last one answered anew. */
async function catchUp() {
  const { id, state, turn, event } = battle;
  if (document.hidden) return;
  if (["idle", "voted", "void"].includes(state)) return lookAtStatus();
  if (!["votable", "interrupted"].includes(state)) return;
  const snapshot = await call("GET", `/battles/${id}`).catch(() => null);
  if (!snapshot || battle.id !== id || battle.state !== state) return;
  const attempts = (eventId) => Math.floor(eventId / EVENT_IDS_PER_ATTEMPT);
  if (snapshot.state === state && snapshot.turns.length === turn && attempts(snapshot.last_event_id) === attempts(event)) return;
  banner("");
  draw(snapshot);
  if (snapshot.state === "streaming") listen();
}

// Before the first battle

function showNotice(then) {
  const accept = el("button", { type: "button", id: "notice-accept", class: "primary" }, say("notice_accept"));
  accept.addEventListener("click", async () => {
    accept.disabled = true;
    try {
      await call("POST", "/notice");
      noticed = true;
      parts.notice.replaceChildren();
      composer.focus();
      then?.();
    } catch (error) {
      accept.disabled = false;
      banner(error.message, "bad");
    }
  });
  parts.notice.replaceChildren(
    el("section", { class: "notice-card", "aria-labelledby": "notice-title" },
      el("div", {}, el("h2", { id: "notice-title" }, say("notice_title")), el("p", {}, say("notice_text")), then ? el("p", { class: "pending", role: "alert" }, say("notice_pending")) : null),
      accept),
  );
  if (then) accept.focus();
}

/** Wherever the next thing to do is another battle. */
async function lookAtStatus() {
  watchStatus(await call("GET", "/status").catch(() => null));
}

/** Fewer than two ready models: says so, and goes on by itself when there are two. */
async function watchStatus(status) {
  if (byId("not-ready")) return; // somebody watches already
  while (status && !status.enough) {
    showNotReady(status);
    await sleep(STATUS_EVERY_MS);
    status = await call("GET", "/status").catch(() => status);
  }
  byId("not-ready")?.remove();
  document.documentElement.removeAttribute("data-not-ready");
}

function showNotReady({ message, ready_models: ready }) {
  const text = page.language === "en" && message ? message : say("not_enough_text", { n: number.format(ready) });
  document.documentElement.setAttribute("data-not-ready", "");
  byId("not-ready")?.remove();
  parts.dock.prepend(
    el("section", { id: "not-ready", class: "notice-card", role: "status" },
      el("div", {}, el("h2", {}, say("not_enough_title")), el("p", {}, text, " ", el("a", { href: "/admin" }, say("nav_admin"))))),
  );
}

// On a narrow screen the two answers lie side by side and are swiped; the tabs say which one is in view.

function tabs() {
  const buttons = SIDES.map((side) =>
    el("button", { type: "button", "data-side": side, "aria-controls": `chat-${side}`, "aria-pressed": String(side === "a"), onclick: () => bring(side) },
      el("span", { class: "badge", "aria-hidden": "true" }, side.toUpperCase()), el("span", { class: "tab-name" }, say(`model_${side}`))));
  parts["side-tabs"].setAttribute("role", "group");
  parts["side-tabs"].setAttribute("aria-label", say("side_tabs"));
  parts["side-tabs"].replaceChildren(...buttons);
  parts.panels.addEventListener("scroll", () => {
    const second = parts.panels.scrollLeft > parts.panels.scrollWidth / 4;
    buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(second === (index === 1))));
  }, { passive: true });
}

function nameTabs(models) {
  for (const side of SIDES) parts["side-tabs"].querySelector(`[data-side="${side}"] .tab-name`).textContent = models[side] ?? say(`model_${side}`);
}

function bring(side) {
  parts.panels.scrollTo({ left: side === "a" ? 0 : parts.panels.scrollWidth, behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
}
