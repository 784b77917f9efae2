// Follows a battle's events through lost connections: server-sent events over fetch, resumed after the last one seen.
//
// EventSource would do, but it hides the server's pings, and so a connection that died without a word.

import { refusal } from "./api.js";
import { sleep } from "./frame.js";

const SILENCE_MS = 8_000; // the server pings every half second
const FIRST_WAIT_MS = 100; // two seconds without a reader end the turn
const LONGEST_WAIT_MS = 3_000;

/**
 * Calls `handle(type, data, id)` for each event until the battle no longer streams, and `lost()` and `back()` around
 * each gap. Resolves to whether its end was seen (not: the server had no more to tell, so a snapshot must), also when
 * `signal` aborts; rejects with ApiError where the server refuses.
 */
export async function follow(battle, after, { handle, lost, back, signal }) {
  let last = after;
  let wait = FIRST_WAIT_MS;
  let ended = false;
  let gap = false;
  while (!ended && !signal.aborted) {
    try {
      const more = await read(`/api/battles/${battle}/events?after=${last}`, signal, {
        open() {
          if (gap) back();
          gap = false;
          wait = FIRST_WAIT_MS;
        },
        event({ id, type, data }) {
          if (id) last = Number(id);
          ended ||= type === "state" && data.state !== "streaming";
          handle(type, data, last);
        },
      });
      if (!more) return false;
    } catch (error) {
      if (signal.aborted) return true;
      if (error.status >= 400 && error.status < 500 && error.status !== 429) throw error;
      if (!gap) lost();
      gap = true;
    }
    if (!ended) {
      await Promise.race([sleep(wait), once("online")]);
      wait = Math.min(wait * 2, LONGEST_WAIT_MS);
    }
  }
  return true;
}

async function read(url, signal, { open, event }) {
  const quiet = new AbortController();
  const stop = () => quiet.abort();
  signal.addEventListener("abort", stop);
  addEventListener("offline", stop);
  let timer = setTimeout(stop, SILENCE_MS);
  try {
    const response = await fetch(url, { signal: quiet.signal, headers: { Accept: "text/event-stream" } });
    if (!response.ok) throw refusal(response.status, await response.json().catch(() => null));
    open();
    if (response.status === 204) return false;
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let buffer = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return true;
      clearTimeout(timer);
      timer = setTimeout(stop, SILENCE_MS);
      buffer = (buffer + value).replaceAll("\r\n", "\n");
      const parts = buffer.split("\n\n");
      buffer = parts.pop();
      for (const part of parts) {
        const parsed = parse(part);
        if (parsed.data) event(parsed);
      }
    }
  } finally {
    clearTimeout(timer);
    signal.removeEventListener("abort", stop);
    removeEventListener("offline", stop);
  }
}

const once = (event) => new Promise((resolve) => addEventListener(event, resolve, { once: true }));

function parse(text) {
  const fields = { id: null, type: "message", data: "" };
  for (const line of text.split("\n")) {
    const [, name, value] = line.match(/^(\w*):? ?(.*)$/s) ?? [];
    if (name === "id") fields.id = value;
    if (name === "event") fields.type = value;
    if (name === "data") fields.data += value;
  }
  return { ...fields, data: fields.data && JSON.parse(fields.data) };
}
