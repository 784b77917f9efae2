// Keeps the leaderboard up to date while it is open: a vote in another tab, or anybody's, shows within seconds.

import { drawn, refresh } from "./frame.js";

const EVERY_MS = 10_000;

const { "leaderboard-table": table } = await drawn("leaderboard-table");
const again = () => document.hidden || refresh(table);
setInterval(again, EVERY_MS);
document.addEventListener("visibilitychange", again);
