// SPDX-License-Identifier: Apache-2.0
// Environments: one line each.

import { environmentActions } from "../actions.js";
import { DELAY, attribute, copyButton, h, keyed, lag, number, size, state, table, text } from "../dom.js";

const COLUMNS = [
  ["Name"], ["State"], ["Provider", "p3"], ["Replicas", "number"], ["Sessions", "number"],
  ["Steps/s", "number p2"], ["Restarts", "number p3"], ["Delay", "number p3", DELAY], ["Memory", "number p2"], ["Address", "p2"], ["Actions", "p2"],
];
const BY = ["name", "state", "provider", "replicas", "sessions", "steps_per_second", "restarts", "lag_p99_seconds", "memory_bytes"];
export const IS_OVER = new Set(["FAILED", "STOPPED"]);
const SERVES = new Set(["READY", "FAILING", "DEGRADED", "ASLEEP"]);

export const addressOf = async (app, name) => (await app.api("GET", `/v1/environments/${encodeURIComponent(name)}/base_url`)).base_url;

function row(app, first) {
  const cells = COLUMNS.map(([, kind]) => h("td", { class: kind }));
  const [name, how, provider, replicas, sessions, steps, restarts, late, memory, address, actions] = cells;
  const shown = state(first.state);
  const heading = h("th", { scope: "row" }, h("a", { href: `#/environment/${first.name}` }, first.name));
  how.append(shown);
  const url = h("code");
  const copy = copyButton(app, `address of ${first.name}`, () => addressOf(app, first.name));
  address.append(url, " ", copy);
  let now = first;
  const button = (title, act) => h("button", { type: "button", class: "quiet small", "aria-label": `${title} ${first.name}`, onclick: () => act(app, now) }, title);
  const scale = button("Scale", environmentActions.scale);
  const down = button("Down", environmentActions.down);
  actions.append(scale, down);
  const element = h("tr", {}, heading, cells.slice(1));
  name.remove();
  element.update = (environment) => {
    now = environment;
    const isOver = IS_OVER.has(environment.state);
    shown.update(environment.state);
    text(provider, environment.provider ?? "local");
    text(replicas, `${environment.ready}/${environment.replicas}`);
    text(sessions, `${number(environment.sessions)}/${environment.max_sessions ? number(environment.max_sessions) : "?"}`);
    text(steps, number(environment.steps_per_second));
    text(restarts, number(environment.restarts));
    attribute(restarts, "data-tone", environment.restarts ? "warn" : null);
    text(late, lag(environment.lag_p99_seconds));
    attribute(late, "data-tone", environment.lag_p99_seconds > 0.1 ? "warn" : null);
    text(memory, size(environment.memory_bytes));
    text(url, environment.address?.replace("http://", "") ?? "–");
    copy.hidden = !environment.address || isOver;
    scale.disabled = !SERVES.has(environment.state);
    down.disabled = environment.state === "STOPPING";
    element.title = environment.error?.message ?? environment.sessions_fail ?? "";
  };
  return element;
}

export default {
  id: "environments",
  title: "Environments",
  kinds: ["environments"],
  mount(body, app) {
    const { element, body: rows } = table("Environments", COLUMNS, BY.length, (column, heads) => {
      [by, isDown] = [BY[column], by === BY[column] ? !isDown : column > 2]; // figures: the largest first
      [...heads].forEach((head, at) => attribute(head, "aria-sort", at === column && (isDown ? "descending" : "ascending")));
      show();
    });
    let [by, isDown] = ["name", false];
    const first = h("button", { type: "button", class: "primary", onclick: async () => {
      try { app.go(`#/request/${(await app.submit("launch", { source: "echo" })).id}`); } catch (error) { app.say(error.message); }
    } }, "Launch echo");
    const version = h("small");
    const none = h("p", { class: "empty buttons" }, "No environment runs yet. ", first, h("a", { class: "button", href: "#/launch" }, "Launch your own"), version);
    const filter = h("input", { type: "search", "data-search": "", placeholder: "Filter", "aria-label": "Filter environments", oninput: () => show() });
    body.append(filter, element, none);
    function show() {
      const order = (a, b) => (a[by] === b[by] ? (a.name < b.name ? -1 : 1) : (a[by] ?? "") < (b[by] ?? "") === isDown ? 1 : -1);
      const all = [...app.store.all("environments").values()].sort(order); // not by localeCompare, whose first call loads locales for 18 ms
      const words = filter.value.toLowerCase();
      const found = all.filter(({ name, state: how, source }) => `${name} ${how} ${source}`.toLowerCase().includes(words));
      element.hidden = found.length === 0;
      none.hidden = all.length > 0;
      filter.hidden = all.length < 2;
      text(version, `openenvd ${app.store.one("daemon")?.version ?? ""}`);
      text(app.heading, `Environments (${all.length})`);
      keyed(rows, found, ({ name }) => name, (each) => row(app, each));
    }
    return { update: show };
  },
};
