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

const live = document.querySelector("[data-numbers]");

// No stream is kept open: a browser opens only six connections to a server, for all its tabs together.
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
}
