// SPDX-License-Identifier: Apache-2.0
// The queue, with why each request waits and for how long; and what has ended lately.

import { cancel, retry } from "../actions.js";
import { age, attribute, duration, h, keyed, number, showProgress, size, state, table, text } from "../dom.js";

const ACTIVE = new Set(["PENDING", "RUNNING"]);

const link = (request) => h("th", { scope: "row" }, h("a", { href: `#/request/${request.id}` }, request.label), " ", h("small", { class: "id" }, request.id.slice(0, 8)));

function queued(app, first) {
  const shown = state(first.state);
  const since = age(first.created_at);
  const why = h("span", { class: "clamp" });
  const progress = h("span", { class: "progress" });
  let now = first;
  const stop = h("button", { type: "button", class: "quiet small", "aria-label": `Cancel ${first.label} ${first.id.slice(0, 8)}`, onclick: () => cancel(app, now) }, "Cancel");
  const element = h("tr", {}, link(first), h("td", {}, shown), h("td", { class: "number p2" }, since), h("td", { class: "why" }, why, " ", progress), h("td", {}, stop));
  element.update = (request) => {
    now = request;
    const isRunning = request.state === "RUNNING";
    shown.update(request.state);
    since.dataset.since = isRunning ? request.started_at : request.created_at;
    text(why, isRunning ? `${[...app.store.all("workers").values()].some((each) => each.task_id === request.id) ? `on ${request.worker}` : "in the daemon"}${request.cancel_requested_at ? ", being cancelled" : ""}` : request.pending_reason);
    attribute(why, "data-tone", request.pending_reason?.includes("memory") ? "warn" : null);
    showProgress(progress, request);
    stop.disabled = request.operation === "down" || Boolean(request.cancel_requested_at);
  };
  return element;
}

export const queue = {
  id: "queue",
  title: "Queue",
  kinds: ["requests", "workers", "daemon"],
  mount(body, app) {
    const { element, body: rows } = table("Requests that run or wait", [["Request"], ["State"], ["For", "number p2"], ["Why"], ["Action"]]);
    const none = h("p", { class: "empty" }, "Nothing runs, and nothing waits.");
    const more = h("a", { class: "more", href: "#/requests" });
    body.append(element, more, none);
    return {
      update(kinds) {
        const counts = app.store.one("daemon")?.requests ?? {};
        text(app.heading, `Queue (${number(counts.RUNNING ?? 0)} running, ${number(counts.PENDING ?? 0)} waiting)`);
        const found = [...app.store.all("requests").values()].filter((each) => ACTIVE.has(each.state))
          .sort((a, b) => (a.state < b.state ? 1 : a.state > b.state ? -1 : (a.place ?? 0) - (b.place ?? 0) || a.created_at - b.created_at));
        if (kinds.has("requests") || kinds.has("workers")) keyed(rows, found, ({ id }) => id, (first) => queued(app, first));
        const left = (counts.RUNNING ?? 0) + (counts.PENDING ?? 0) - found.length;
        text(more, left > 0 ? `and ${number(left)} more` : "");
        element.hidden = found.length === 0;
        none.hidden = found.length > 0;
      },
    };
  },
};

function past(app, first) {
  const shown = state(first.state);
  const took = h("td", { class: "number p2" });
  const peak = h("td", { class: "number p2" });
  const why = h("span", { class: "clamp" });
  const again = h("button", { type: "button", class: "quiet small", "aria-label": `Retry ${first.label} ${first.id.slice(0, 8)}`, onclick: () => retry(app, first.id, first.label) }, "Retry");
  const heading = link(first);
  const since = age(first.created_at);
  const count = heading.appendChild(h("strong"));
  const element = h("tr", {}, heading, h("td", {}, shown), h("td", { class: "number p2" }, since), took, h("td", { class: "why" }, why), peak, h("td", {}, again));
  element.update = (request) => {
    shown.update(request.state);
    since.dataset.since = request.finished_at ?? request.created_at;
    text(count, request.count > 1 ? ` × ${request.count}` : "");
    text(took, request.started_at && request.finished_at ? duration(request.finished_at - request.started_at) : "–");
    text(why, request.error?.message.split("\n")[0] ?? request.pending_reason);
    why.title = request.error?.message ?? "";
    text(peak, size(request.peak_bytes || null));
    again.hidden = request.state === "SUCCEEDED" || ACTIVE.has(request.state);
  };
  return element;
}

/** Failures of one cause as the newest of them, with their count. */
function byCause(requests) {
  const found = new Map();
  for (const each of requests) {
    const words = each.error?.message.replaceAll(each.environment ?? " ", " ").replace(/\b[0-9a-f]{8,}\b|\d+/g, "0");
    const cause = words ? `${each.operation} ${words}` : each.id;
    const known = found.get(cause);
    found.set(cause, { ...(known ?? each), count: (known?.count ?? 0) + 1 });
  }
  return [...found.values()];
}

const ENDED = [["Request"], ["State"], ["Ago", "number p2"], ["Took", "number p2"], ["Why"], ["Peak", "number p2"], ["Action"]];
const STATES = ["FAILED", "RUNNING", "PENDING", "SUCCEEDED", "CANCELLED"];
const MANY = 200; // requests that are read at once

/** All requests, at `#/requests`. */
export default {
  mount(body, app) {
    const which = h("select", { "aria-label": "State", onchange: () => read() }, h("option", { value: "" }, "every state"), STATES.map((each) => h("option", { value: each }, each.toLowerCase())));
    const filter = h("input", { type: "search", "data-search": "", placeholder: "Filter", "aria-label": "Filter requests", oninput: () => show() });
    const { element, body: rows } = table("Requests, newest first", ENDED);
    const more = h("button", { type: "button", onclick: () => { many += MANY; read(); } }, "Older ones");
    const none = h("p", { class: "empty" }, "There is no such request.");
    body.append(h("p", { class: "buttons" }, filter, which), element, none, more);
    let [found, many, asked, isStale] = [[], MANY, "", false];

    async function read() {
      isStale = false;
      const query = (asked = String(new URLSearchParams({ limit: Math.min(many, 1000), ...(which.value && { state: which.value }) })));
      try {
        const { requests } = await app.api("GET", `/v1/requests?${query}`);
        if (query !== asked) return; // another state was chosen meanwhile
        found = requests;
        show();
      } catch (error) { app.say(error.message); }
    }

    function show() {
      const words = filter.value.toLowerCase();
      const fits = found.filter((each) => `${each.label} ${each.id} ${each.state} ${each.error?.message ?? ""}`.toLowerCase().includes(words));
      keyed(rows, fits, ({ id }) => id, (first) => past(app, first));
      none.hidden = fits.length > 0;
      element.hidden = !fits.length;
      more.hidden = found.length < many || many >= 1000;
    }
    read();
    return { update() { isStale = true; }, tick() { if (isStale) read(); } };
  },
};

export const ended = {
  id: "ended",
  title: "Ended lately",
  kinds: ["requests", "daemon"],
  mount(body, app) {
    const { element, body: rows } = table("Requests that ended lately", ENDED);
    const none = h("p", { class: "empty" });
    const all = h("p", { class: "more" }, h("a", { href: "#/requests" }, "All requests"));
    body.append(element, none, all);
    return {
      update() {
        const known = [...app.store.all("requests").values()].filter((each) => !ACTIVE.has(each.state)).sort((a, b) => b.finished_at - a.finished_at);
        const found = byCause(known);
        keyed(rows, found, ({ id }) => id, (first) => past(app, first));
        element.hidden = found.length === 0;
        none.hidden = found.length > 0;
        const counts = app.store.one("daemon")?.requests ?? {};
        all.hidden = !(counts.SUCCEEDED || counts.FAILED || counts.CANCELLED);
        text(none, all.hidden ? "Nothing has ended yet." : "Lately, nothing but short requests has ended.");
      },
    };
  },
};
