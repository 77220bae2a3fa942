// Everything can be read without this script. It completes a login link, and says when a conversation has grown.
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

const live = document.querySelector("[data-events]");
let source = null;

function show(event) {
  const { last_seq: last } = JSON.parse(event.data);
  const count = last - Number(live.dataset.seen);
  if (count > 0) {
    const link = live.querySelector("a");
    link.textContent = count === 1 ? "1 new entry" : `${count} new entries`;
    link.hidden = false;
  }
}

// One stream for a visible tab: a browser opens only six connections to a server.
function follow() {
  if (document.visibilityState === "visible" && !source) {
    source = new EventSource(live.dataset.events);
    source.addEventListener("numbers", show);
  } else if (document.visibilityState !== "visible" && source) {
    source.close();
    source = null;
  }
}

if (live) {
  if (!location.search && !location.hash) {
    document.querySelector(".conversation").scrollIntoView({ behavior: "instant", block: "end" });
  }
  document.addEventListener("visibilitychange", follow);
  follow();
}
