// The admin's view: keeps the table live, and its buttons call /api/admin. The form is Gradio's (app/views/admin.py).

import { call } from "./api.js";
import { byId, drawn, el, refresh, say, sleep } from "./frame.js";

const EVERY_MS = 1_000;
const VOTES_EVERY_MS = 5_000;
const SURE_FOR_MS = 4_000;
const ACTIONS = {
  enable: (path) => call("PATCH", path, { enabled: true }),
  disable: (path) => call("PATCH", path, { enabled: false }),
  retire: (path) => call("DELETE", path),
  quarantine: (path, { why }) => call("POST", `${path}/quarantine`, { why }),
  release: (path) => call("POST", `${path}/release`),
};

const { "admin-models": table, "admin-votes": votes, "admin-suspects": suspects, "admin-head": head, register } = await drawn("admin-models", "admin-votes", "admin-suspects", "admin-head", "register", "register-head", "source-help", "field-source", "register-said");
const said = el("p", { id: "admin-said", class: "note bad", role: "alert", hidden: true });
table.before(said);
head.addEventListener("click", (event) => event.target.closest("#logout") && signOut());
table.addEventListener("click", (event) => press(event.target.closest("button[data-action]"), table));
suspects.addEventListener("click", (event) => press(event.target.closest("button[data-action]"), suspects, votes));
suspects.addEventListener("click", (event) => look(event.target.closest("#suspects-look")));
byId("source-help").addEventListener("click", (event) => fill(event.target.closest("[data-source]")));
byId("register-said").setAttribute("role", "status");
new MutationObserver(markInvalid).observe(register, { subtree: true, attributes: true, attributeFilter: ["class"] });
keepLive(EVERY_MS, table, head);
keepLive(VOTES_EVERY_MS, votes);

async function keepLive(pause, ...slots) {
  for (;;) {
    await sleep(pause);
    if (!document.hidden) await Promise.all(slots.map(refresh));
  }
}

/** `changed`: the slots that show what a button does. */
async function press(button, ...changed) {
  if (!button || (button.dataset.action === "retire" && !isSure(button))) return;
  button.disabled = true;
  try {
    const { action, model, visitor } = button.dataset;
    const path = visitor ? `/admin/visitors/${encodeURIComponent(visitor)}` : `/admin/models/${encodeURIComponent(model)}`;
    await ACTIONS[action](path, button.dataset);
    said.hidden = true;
  } catch (error) {
    if (error.status === 401) return location.assign("/admin/login");
    said.textContent = error.message;
    said.hidden = false;
  } finally {
    button.disabled = false;
    await Promise.all(changed.map(refresh));
  }
}

/** Reads every vote, which may take seconds. */
async function look(button) {
  if (!button) return;
  button.disabled = true;
  await refresh(suspects);
  button.disabled = false;
}

/** Retiring cannot be undone, so it takes two presses. */
function isSure(button) {
  if (button.dataset.sure) return true;
  const before = button.textContent;
  button.dataset.sure = "yes";
  button.textContent = say("retire_sure");
  button.removeAttribute("aria-label");
  setTimeout(() => {
    delete button.dataset.sure;
    button.textContent = before;
    button.setAttribute("aria-label", say("retire_label", { name: button.dataset.model }));
  }, SURE_FOR_MS);
  return false;
}

function fill(example) {
  if (!example) return;
  const input = byId("field-source").querySelector("input, textarea");
  input.value = example.dataset.source;
  input.dispatchEvent(new Event("input", { bubbles: true }));
  input.focus();
}

/** The server marks a wrong field by a class on its box; assistive technology wants it on the input. */
function markInvalid() {
  for (const field of register.querySelectorAll("[id^=field-]")) {
    for (const input of field.querySelectorAll("input, textarea")) input.setAttribute("aria-invalid", String(field.classList.contains("invalid")));
  }
}

async function signOut() {
  await call("POST", "/admin/logout");
  location.assign("/");
}
