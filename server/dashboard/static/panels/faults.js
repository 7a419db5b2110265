// SPDX-License-Identifier: Apache-2.0
// Faults: whole on the page that one is about, as a bar on the others, until a user marks it as seen.

import { commandButton, hintOf } from "../actions.js";
import { age, attribute, copyButton, duration, h, keyed, plural, size, text } from "../dom.js";

const MAX_BARS = 3; // on the overview; elsewhere one
const TITLES = {
  out_of_memory: "Out of memory", failed: "Failed", failing: "Failing", restarting: "Restarted",
  waiting: "Waits too long", abandoned: "Steps go on without a session", gateway: "Gateway exited",
};
const seenHere = new Set(); // until the daemon says so

function facts(fault) {
  const evidence = fault.evidence ?? {};
  return [
    ["Limit", evidence.limit_bytes && size(evidence.limit_bytes)],
    ["Peak", evidence.peak_bytes && size(evidence.peak_bytes)],
    ["Ran for", evidence.seconds && duration(evidence.seconds)],
    ["Killed", evidence.victim_name && `${evidence.victim_name} (pid ${evidence.victim_pid})`],
    ["Evidence", evidence.evidence],
    ["Certainty", evidence.certainty],
  ].filter(([, value]) => value);
}

function card(app, first, isWhole, see) {
  let now = first;
  const [count, since] = [h("strong"), age(first.at)];
  const story = h("p", { class: "story" });
  const list = h("dl", { class: "facts" }, facts(first).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  const tail = first.log_tail?.length ? h("details", {}, h("summary", {}, "Last lines of its log"), h("pre", {}, first.log_tail.join("\n"))) : null;
  const seen = () => see(now);
  const more = h("strong");
  const hint = isWhole ? h("p", { class: "buttons" }, first.command ? h("code", { class: "command" }, first.command) : null,
    first.command ? copyButton(app, "command", () => now.command) : null, first.hint ? h("span", {}, hintOf(app, first.hint)) : null) : null;
  const buttons = h("p", { class: "buttons" }, commandButton(app, () => now, seen), more,
    isWhole ? null : h("a", { class: "button", href: first.page }, first.page.startsWith("#/request/") ? "Timeline and log" : first.page === "#/" ? "Overview" : "Environment and log"),
    h("button", { type: "button", onclick: seen }, "Seen"));
  const element = h("article", { class: isWhole ? "fault" : "fault bar", "data-kind": first.kind },
    h("h3", {}, h("span", { class: "badge" }, `✕ ${TITLES[first.kind]}`), " ", first.subject, " ", count, " ", h("small", {}, since, " ago")),
    story, isWhole ? list : null, isWhole ? tail : null, hint, buttons);
  element.update = (fault) => {
    now = fault;
    text(count, fault.count > 1 ? `× ${fault.count}` : "");
    attribute(since, "data-since", fault.at ?? "");
    since.parentNode.hidden = !fault.at;
    text(more, fault.runs_again_with_bytes ? `It runs again by itself, with ${size(fault.runs_again_with_bytes)}.` : "");
    text(story, isWhole ? fault.message : fault.message.split("\n")[0]);
  };
  return element;
}

const about = (hash) => (hash.replace(/^#$/, "") || "#/").split("/").slice(0, 3).join("/");

export default {
  id: "faults",
  title: "Faults",
  place: "top",
  isEverywhere: true,
  kinds: ["faults"],
  mount(body, app) {
    const announced = h("p", { class: "unseen", role: "alert" }); // the cards have ages, which change
    const list = h("div");
    const all = h("button", { type: "button", onclick: () => { isAll = true; update(); } });
    const none = h("button", { type: "button", onclick: () => see({ ids: fresh().flatMap(({ ids }) => ids) }) }, "All seen");
    let isAll = false;
    body.append(announced, list, h("p", { class: "buttons" }, all, none));
    const fresh = () => [...app.store.all("faults").values()]
      .filter(({ is_seen: isSeen, ids }) => !isSeen && !ids.every((id) => seenHere.has(id))).sort((a, b) => (b.at ?? 0) - (a.at ?? 0));
    async function see({ ids }) {
      ids.forEach((id) => seenHere.add(id));
      update();
      for (let at = 0; at < ids.length; at += 500) await app.api("POST", "/v1/dashboard/seen", { ids: ids.slice(at, at + 500) });
    }
    function update() {
      const found = fresh();
      const here = about(location.hash);
      const isHere = ({ page }) => about(page) === here;
      const own = found.filter(isHere);
      const others = found.filter((fault) => !isHere(fault));
      const bars = others.slice(0, isAll ? others.length : here === "#/" ? MAX_BARS : 1);
      app.section.hidden = found.length === 0;
      const counted = found.filter(({ kind }) => kind === "out_of_memory").length;
      app.setAlarm([counted && `${counted} out of memory`, found.length > counted && plural(found.length - counted, "fault")].filter(Boolean).join(", "));
      text(announced, found.length ? `${TITLES[found[0].kind]}: ${found[0].subject}. ${found[0].message}` : "");
      // What is shown of a fault does not change but by `update`; its newest member is another card.
      keyed(list, [...own, ...bars], (fault) => `${isHere(fault)} ${fault.id} ${fault.command} ${fault.hint}`, (fault) => card(app, fault, isHere(fault), see));
      all.hidden = bars.length === others.length;
      text(all, `Show ${others.length - bars.length} more`);
      none.hidden = found.length < 2;
    }
    update();
    return { update };
  },
};
