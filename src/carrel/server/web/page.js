// Everything can be read and done without this script. It completes a login link, says when a conversation has grown,
// and has keys. It makes no HTML, so the policy allows no Trusted Types policy at all.
"use strict";

const enter = document.getElementById("enter");

function logIn() {
  if (enter && location.hash.length > 1) {
    enter.elements.key.value = location.hash.slice(1);
    history.replaceState(null, "", location.pathname + location.search);
    enter.submit();
  }
}

logIn();
addEventListener("hashchange", logIn);

// --- live ---

const live = document.querySelector("[data-numbers]");

// A visible tab asks every two seconds; no stream is kept open: a browser opens only six connections to a server for all
// its tabs together, and several windows can be visible at once. The answer is two numbers, and asking again is all that
// it takes after the server was restarted.
async function look() {
  if (document.visibilityState !== "visible") return;
  const answer = await fetch(live.dataset.numbers).catch(() => null);
  if (!answer?.ok) return;
  const count = (await answer.json()).last_seq - Number(live.dataset.seen);
  if (count > 0) {
    const link = live.querySelector("a");
    link.textContent = count === 1 ? "1 new entry" : `${count} new entries`;
    link.hidden = false;
  }
}

if (live) {
  if (!location.search && !location.hash) {
    document.querySelector(".conversation").scrollIntoView({ behavior: "instant", block: "end" });
  }
  setInterval(look, 2000);
  addEventListener("visibilitychange", look);
}

// --- keys ---

const dialog = document.getElementById("keys");
const switchOfKeys = document.getElementById("keys-on");
const ALL = "article, .mark, [data-step]";
let chosen = null;

function choose(selector, step) {
  const found = [...document.querySelectorAll(selector)];
  if (!found.length) return;
  // From what is chosen, or from the first one in view.
  const place = (each) => each.getBoundingClientRect().top;
  const start = chosen ? place(chosen) : 0;
  const next =
    step > 0
      ? found.find((each) => each !== chosen && place(each) > start + (chosen ? 0 : -1))
      : found.findLast((each) => each !== chosen && place(each) < start);
  if (!next) return;
  chosen?.classList.remove("chosen");
  chosen = next;
  chosen.classList.add("chosen");
  const target = chosen.querySelector("a, summary") ?? chosen;
  if (target === chosen) chosen.tabIndex = -1;
  target.focus({ preventScroll: true });
  chosen.scrollIntoView({ block: "nearest" });
}

const session = document.querySelector("[data-session]")?.dataset.session;

function go(path) {
  if (session) location.assign(`/s/${encodeURIComponent(session)}${path}`);
}

function point() {
  const entry = chosen?.id?.match(/^entry-(\d+)$/)?.[1];
  const link = chosen?.querySelector('a[href^="/s/"]')?.getAttribute("href").match(/^\/s\/([^/?#]+)/)?.[1];
  if (session) return entry ? `${session}@${entry}` : session;
  return link ? decodeURIComponent(link) : null;
}

function compare() {
  const [marked, here] = [sessionStorage.getItem("marked"), point()];
  if (marked && here) location.assign(`/compare?a=${encodeURIComponent(marked)}&b=${encodeURIComponent(here)}`);
}

function mark() {
  const here = point();
  if (here) sessionStorage.setItem("marked", here);
}

const KEYS = {
  j: () => choose(ALL, 1),
  k: () => choose(ALL, -1),
  "]": () => choose("article.user", 1),
  "[": () => choose("article.user", -1),
  e: () => choose(".call.error, .call.interrupted, .mark.error", 1),
  o: () => go(""),
  t: () => go("/tree"),
  v: () => go("/variables"),
  f: () => go("/files"),
  g: () => location.assign("/"),
  "/": () => document.querySelector('[type="search"], .search input:not([type="hidden"])')?.focus(),
  x: mark,
  c: compare,
};

if (dialog) {
  switchOfKeys.checked = localStorage.getItem("keys") !== "off";
  switchOfKeys.addEventListener("change", () => localStorage.setItem("keys", switchOfKeys.checked ? "on" : "off"));
  addEventListener("keydown", (event) => {
    // A dialog that was closed keeps the focus until the next frame, and swallows no key.
    const isTyping = event.target.closest?.("input:not([type=radio], [type=checkbox]), textarea, select, dialog[open]");
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    const action = event.key === "?" ? () => dialog.showModal() : switchOfKeys.checked ? KEYS[event.key] : null;
    if (action) {
      event.preventDefault();
      action();
    }
  });
}
