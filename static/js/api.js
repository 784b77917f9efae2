// Calls to /api. A refusal becomes an ApiError with the sentence to show; no connection has status 0.
//
// The server writes English and knows best what it refused; in another language the table has a sentence for each code.

import { number, page, say } from "./frame.js";

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    Object.assign(this, { status, code });
  }
}

export function refusal(status, body) {
  const { code = "", message = "", tokens, limit } = body?.error ?? {};
  const key = `error_${code}` in page.words ? `error_${code}` : "went_wrong";
  const ours = say(key, { tokens: number.format(tokens), limit: number.format(limit) });
  return new ApiError(status, code, page.language === "en" && message ? message : ours);
}

/** The JSON of the answer, or null where there is none. */
export async function call(method, path, body, { signal } = {}) {
  const options = { method, signal, headers: { Accept: "application/json" } };
  if (body !== undefined) {
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(`/api${path}`, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "offline", say("offline"));
  }
  const answer = await response.json().catch(() => null);
  if (!response.ok) throw refusal(response.status, answer);
  return answer;
}
