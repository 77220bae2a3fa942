// Everything can be read and done without this script. It completes a login link, lets the page of a conversation
// grow, and has keys. It makes no HTML of text, so the policy allows no Trusted Types policy at all.
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

// --- a conversation that grows ---

const log = document.querySelector(".conversation");
const LARGEST = 1000; // Entries in one page; with more of them, links lead to another page.
const AGAIN = 20; // Shown entries that are fetched again, for the results of their calls.

// The browser makes a document of the page, without running anything of it.
function load(path) {
  return new Promise((done) => {
    const request = new XMLHttpRequest();
    request.open("GET", path);
    request.responseType = "document";
    request.onload = () => done(request.response?.querySelector(".conversation") ? request.response : null);
    request.onerror = () => done(null);
    request.send();
  });
}

// Changes the conversation, and keeps what is in view where it is.
function keepPlace(change) {
  const place = (each) => each.getBoundingClientRect();
  const anchor = [...log.children].find((each) => place(each).bottom > 0);
  const before = anchor && place(anchor).top;
  change();
  if (anchor?.isConnected) scrollBy({ top: place(anchor).top - before, behavior: "instant" });
}

// Adds what another page of the conversation has; a call that had no result may have one now.
function merge(page, side) {
  const fetched = page.querySelector(".conversation");
  const last = Number(log.dataset.last);
  const isSame = (day) => (other) => other.textContent === day.textContent;
  const added = [...fetched.children].filter((each) => {
    const known = each.id ? document.getElementById(each.id) : null;
    if (known?.querySelector(".call.no-result")) keepPlace(() => known.replaceWith(each));
    // A result whose call is not on the fetched page stands alone there.
    const isOld = side === "after" && each.id && Number(each.id.slice(6)) <= last;
    return !known && !isOld && each.className !== "empty";
  });
  const days = [...log.querySelectorAll(":scope > .day")];
  const lines = document.querySelector(".outline .lines");
  const links = new Set([...(lines?.querySelectorAll("a") ?? [])].map((link) => link.hash));
  const fresh = [...page.querySelectorAll(".outline li")].filter((line) => !links.has(line.querySelector("a").hash));
  keepPlace(() => {
    if (added.length) log.querySelector(":scope > .empty")?.remove();
    if (side === "before") {
      for (const day of added.filter((each) => each.className === "day")) days.find(isSame(day))?.remove();
      log.prepend(...added);
      lines?.prepend(...fresh);
    } else {
      log.append(...added.filter((each) => each.className !== "day" || !days.some(isSame(each))));
      lines?.append(...fresh);
      log.dataset.last = fetched.dataset.last;
    }
  });
}

// "Older" and "Newer" extend the page in place.
addEventListener("click", async (event) => {
  const link = log && event.target.closest?.('.reading a[rel="prev"], .reading a[rel="next"]');
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey || log.children.length > LARGEST) return;
  event.preventDefault();
  const page = await load(link.href);
  if (!page) return location.assign(link.href);
  const next = page.querySelector(`.more:has(a[rel="${link.rel}"])`);
  merge(page, link.rel === "next" ? "after" : "before");
  if (next) keepPlace(() => link.closest(".more").replaceWith(next));
  else keepPlace(() => link.closest(".more").remove());
  next?.querySelector("a").focus({ preventScroll: true });
});

// A visible tab asks every two seconds; no stream is kept open: a browser opens only six connections to a server for all
// its tabs together, and several windows can be visible at once. The answer is two numbers, and asking again is all that
// it takes after the server was restarted.
const notice = document.querySelector(".live a");
let unread = 0;
let isLooking = false;

const isAtEnd = () => (log.lastElementChild?.getBoundingClientRect().bottom ?? 0) <= innerHeight + 40;

function announce() {
  notice.textContent = unread === 1 ? "1 new entry" : `${unread} new entries`;
  notice.hidden = unread === 0;
}

async function look() {
  if (document.visibilityState !== "visible" || isLooking) return;
  isLooking = true;
  try {
    const answer = await fetch(log.dataset.numbers).catch(() => null);
    const last = answer?.ok ? (await answer.json()).last_seq : 0;
    const [seen, end] = [Number(log.dataset.seen), Number(log.dataset.last)];
    if (last <= seen) return;
    const canGrow = end === seen && log.children.length < LARGEST;
    const page = canGrow && (await load(`${location.pathname}?after=${Math.max(seen - AGAIN, 0)}${log.dataset.filter}`));
    const follow = isAtEnd();
    if (page) merge(page, "after");
    const now = page ? Number(log.dataset.last) : last;
    // Results are shown with their calls, so the first new entry may have no place of its own.
    const first = [...log.children].find((each) => Number(each.id.slice(6)) > seen) ?? log.lastElementChild;
    if (!unread) notice.href = page ? `#${first?.id}` : location.pathname;
    unread = page && follow ? 0 : unread + now - seen;
    log.dataset.seen = now;
    announce();
    if (page && follow) log.scrollIntoView({ behavior: "instant", block: "end" });
  } finally {
    isLooking = false;
  }
}

if (log) {
  if (!location.search && !location.hash) log.scrollIntoView({ behavior: "instant", block: "end" });
  const read = () => {
    unread = 0;
    announce();
  };
  notice.addEventListener("click", read);
  addEventListener("scroll", () => unread && log.dataset.last === log.dataset.seen && isAtEnd() && read(), { passive: true });
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
