// SPDX-License-Identifier: Apache-2.0
// Deaths for memory: at the top, until a user marks them as seen.

import { moreButton } from "../actions.js";
import { age, copyButton, duration, h, keyed, size, text } from "../dom.js";

const SEEN = "openenvd-seen-deaths";
const MAX_SEEN = 200;
const MAX_SHOWN = 3;

const seen = () => new Set(JSON.parse(localStorage.getItem(SEEN) ?? "[]"));
const see = (ids) => localStorage.setItem(SEEN, JSON.stringify([...seen(), ...ids].slice(-MAX_SEEN)));

function facts(evidence) {
  if (!evidence) return [];
  return [
    ["Limit", evidence.limit_bytes && size(evidence.limit_bytes)],
    ["Peak", evidence.peak_bytes && size(evidence.peak_bytes)],
    ["Ran for", evidence.seconds && duration(evidence.seconds)],
    ["Killed", evidence.victim_name && `${evidence.victim_name} (pid ${evidence.victim_pid})`],
    ["Evidence", evidence.evidence],
    ["Certainty", evidence.certainty],
  ].filter(([, value]) => value);
}

function card(app, death, update) {
  const isCommand = death.hint?.startsWith("openenv ");
  const tail = death.log_tail?.length ? h("details", {}, h("summary", {}, "Last lines of its log"), h("pre", {}, death.log_tail.join("\n"))) : null;
  return h("article", { class: "death", "data-id": death.id },
    h("h3", {}, h("span", { class: "badge" }, "✕ Out of memory"), " ", death.subject, " ", death.at ? h("small", {}, age(death.at), " ago") : null),
    h("p", { class: "story" }, death.message),
    h("dl", { class: "facts" }, facts(death.evidence).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    tail,
    h("p", { class: "buttons" },
      moreButton(app, () => death, () => { see([death.id]); update(); }),
      death.runs_again_with_bytes ? h("strong", {}, `It runs again by itself, with ${size(death.runs_again_with_bytes)}.`) : null,
      isCommand ? h("code", { class: "command" }, death.hint) : h("span", {}, death.hint ?? ""),
      isCommand ? copyButton(app, "command", () => death.hint) : null,
      h("a", { class: "button", href: death.log }, death.log.startsWith("#/request/") ? "Timeline and log" : "Environment and log"),
      h("button", { type: "button", onclick: () => { see([death.id]); update(); } }, "Seen")));
}

export default {
  id: "deaths",
  title: "Out of memory",
  place: "top",
  isEverywhere: true,
  kinds: ["deaths"],
  mount(body, app) {
    const announced = h("p", { class: "unseen", role: "alert" }); // the cards have ages, which change
    const list = h("div");
    const more = h("p", { class: "buttons" });
    body.append(announced, list, more);
    const update = () => {
      const known = seen();
      const fresh = [...app.store.all("deaths").values()].filter(({ id }) => !known.has(id)).sort((a, b) => (b.at ?? 0) - (a.at ?? 0));
      app.section.hidden = fresh.length === 0;
      app.setAlarm(fresh.length ? `${fresh.length} out of memory` : "");
      text(announced, fresh.length ? `Out of memory: ${fresh[0].subject}. ${fresh[0].message}` : "");
      keyed(list, fresh.slice(0, MAX_SHOWN), ({ id }) => id, (death) => card(app, death, update));
      more.replaceChildren(...(fresh.length > 1 ? [h("button", { type: "button", onclick: () => { see(fresh.map(({ id }) => id)); update(); } }, `All ${fresh.length} seen`)] : []));
    };
    update();
    return { update };
  },
};
