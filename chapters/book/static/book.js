// Which language is shown: zh, en or both, remembered in this browser. Runs before the page is painted.
"use strict";

(() => {
  const KEY = "minidist-language";
  const page = document.documentElement;
  const unmarked = page.lang; // of what belongs to neither language: code, what it printed

  function remembered() {
    try { return localStorage.getItem(KEY); } catch { return null; } // storage may be forbidden
  }

  function show(choice) {
    if (!["zh", "en", "both"].includes(choice)) choice = "both";
    page.dataset.language = choice;
    page.lang = { zh: "zh-CN", en: "en", both: unmarked }[choice];
    for (const button of document.querySelectorAll("[data-show-language]"))
      button.setAttribute("aria-pressed", button.dataset.showLanguage === choice);
  }

  // The first heading or cell in the window stays where it is when the text above it gets shorter or longer.
  function keepPlace(change) {
    const top = (row) => row.getBoundingClientRect().top;
    const rows = [...document.querySelectorAll("article :is(.cell, h1, h2, h3)")];
    const row = rows.find((row) => top(row) > 0 && top(row) < innerHeight)
      ?? rows.findLast((row) => top(row) <= 0);
    const before = row && top(row);
    page.style.overflowAnchor = "none"; // the browser's own attempt may hold on to what gets hidden
    change();
    if (row) scrollBy({ top: top(row) - before, behavior: "instant" });
    requestAnimationFrame(() => setTimeout(() => { page.style.overflowAnchor = ""; }));
  }

  show(remembered());
  addEventListener("storage", (event) => { if (event.key === KEY) show(event.newValue); }); // another tab

  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-show-language]");
    if (button) {
      const choice = button.dataset.showLanguage;
      try { localStorage.setItem(KEY, choice); } catch { /* then it holds for this page */ }
      keepPlace(() => show(choice));
    }
    // The pages are long: a search result opens where the words stand.
    const result = event.target.closest("#search-results a:not([href*='#'])");
    const words = new URLSearchParams(location.search).get("q");
    if (result && words) result.href += "#:~:text=" + encodeURIComponent(words);
  });

  document.addEventListener("DOMContentLoaded", () => {
    show(page.dataset.language); // the buttons are there now
    // A browser lets no page read another from a disk, so a result shows no excerpt there.
    if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
  });
})();
