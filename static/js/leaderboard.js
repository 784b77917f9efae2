// Keeps the leaderboard up to date while it is open: a vote in another tab, or anybody's, shows within seconds.

import { drawn, refresh } from "./frame.js";

const EVERY_MS = 10_000;

// Another language shows the same view.
const language = document.querySelector(".language");
const there = new URLSearchParams(location.search);
there.set("lang", new URLSearchParams(language.search).get("lang"));
language.search = there;

const { "leaderboard-table": table } = await drawn("leaderboard-table");
/** Unless somebody is filling in the filters, or reading a map. */
const isInUse = () => table.querySelector("form :focus") || [...table.querySelectorAll("details")].some((map) => map.open !== map.matches(":first-of-type"));
const again = () => document.hidden || isInUse() || refresh(table);
setInterval(again, EVERY_MS);
document.addEventListener("visibilitychange", again);
