// Light or dark, before the first paint: what the visitor chose here, else what the system says (tokens.css).
try {
  const kept = localStorage.getItem("arena.look");
  if (kept) document.documentElement.dataset.look = kept;
} catch { /* storage is switched off: the system decides */ }
