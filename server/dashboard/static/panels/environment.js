// SPDX-License-Identifier: Apache-2.0
// One environment: figures, address and snippet, replicas, generations, its log, and what can be done.

import { environmentActions } from "../actions.js";
import { age, attribute, copyButton, h, keyed, lag, number, size, state, table, text } from "../dom.js";
import { IS_OVER, addressOf } from "./environments.js";
import { logView } from "./request.js";

const snippet = (url) => `from openenv import GenericEnvClient\nwith GenericEnvClient(base_url="${url}").sync() as env:\n    print(env.reset())`;

function replicaRow(first) {
  const shown = state(first.state);
  const cells = Array.from({ length: 6 }, () => h("td", { class: "number" }));
  const [sessions, steps, restarts, late, memory, pid] = cells;
  for (const each of [restarts, late, pid]) each.classList.add("p2");
  const message = h("td", { class: "why" });
  const element = h("tr", {}, h("th", { scope: "row" }, `${first.ordinal}`, " ", h("small", { class: "id" }, first.id)), h("td", {}, shown), cells, message);
  element.update = (replica) => {
    shown.update(replica.state);
    text(sessions, `${number(replica.sessions)}/${replica.max_sessions ?? "?"}`);
    text(steps, number(replica.steps_per_second));
    text(restarts, replica.restarts);
    text(late, lag(replica.lag_p99_seconds));
    text(memory, size(replica.memory_bytes));
    text(pid, replica.pid ?? "–");
    text(message, replica.shard_exit?.message ?? replica.message);
    attribute(message, "data-tone", replica.message || replica.shard_exit ? "warn" : null);
  };
  return element;
}

export default {
  id: "environment",
  title: "Environment",
  kinds: ["environments", "replicas"],
  mount(body, app, name) {
    text(app.heading, name);
    const shown = state("");
    const facts = h("dl", { class: "facts" });
    const fact = (title) => { const value = h("dd"); facts.append(h("div", {}, h("dt", {}, title), value)); return value; };
    const [how, provider, generation, ready, sessions, steps, restarts, late, memory, serving] =
      ["State", "Provider", "Generation", "Replicas", "Sessions", "Steps/s", "Restarts", "Loop lag p99", "Memory", "Served by"].map(fact);
    how.append(shown);
    const problem = h("p", { class: "notice bad", role: "status" });
    let now = null;
    const buttons = Object.entries({ Scale: environmentActions.scale, Restart: environmentActions.restart, "Roll back": environmentActions.rollback, "Take down": environmentActions.down })
      .map(([title, act]) => h("button", { type: "button", class: title === "Take down" ? "danger" : null, onclick: () => now && act(app, now) }, title));
    const code = h("pre", {}, "");
    const address = h("section", { "aria-label": "Address" }, h("h3", {}, "Connect"),
      h("p", {}, h("code", { class: "address" }), " ", copyButton(app, "address", () => addressOf(app, name))),
      code, copyButton(app, "snippet", async () => snippet(await addressOf(app, name))));
    const replicas = table(`Replicas of ${name}`, [["Replica"], ["State"], ["Sessions", "number"], ["Steps/s", "number"], ["Restarts", "number p2"], ["Lag p99", "number p2"], ["Memory", "number"], ["Pid", "number p2"], ["What happened"]]);
    Object.assign(replicas.element, { tabIndex: 0, role: "region", ariaLabel: "Replicas" }); // it has no link: else no key scrolls it
    const generations = table(`Generations of ${name}`, [["Generation"], ["State"], ["Began", "number"], ["Launch"], ["Why"], ["Action"]]);
    body.append(problem, facts, h("p", { class: "buttons" }, buttons), address, h("h3", {}, "Replicas"), replicas.element, h("h3", {}, "Generations"), generations.element, h("h3", {}, "Log"));
    const log = logView(app, `environments/${name}`);
    body.append(log.element);

    let known = "";
    const showGenerations = async () => {
      let answer;
      try { answer = await app.api("GET", `/v1/environments/${encodeURIComponent(name)}`); } catch (error) { text(problem, error.message); return; }
      generations.body.replaceChildren(...answer.environment.generations.map((each) => h("tr", {},
        h("th", { scope: "row" }, String(each.number)), h("td", {}, state(each.state)), h("td", { class: "number" }, age(each.created_at)),
        h("td", {}, h("a", { href: `#/request/${each.request_id}` }, each.request_id.slice(0, 8))), h("td", { class: "why" }, each.error ?? ""),
        h("td", {}, each.served_at && each.number !== answer.environment.generation ? h("button", { type: "button", class: "quiet small", "aria-label": `Roll back to generation ${each.number}`, onclick: () => now && environmentActions.rollback(app, now, each.number) }, "Roll back to") : ""))));
    };
    return {
      update() {
        const environment = app.store.get("environments", name);
        if (!environment) { text(problem, `${name} does not run.`); for (const each of buttons) each.disabled = true; return; }
        now = environment;
        const isOver = IS_OVER.has(environment.state);
        shown.update(environment.state);
        text(provider, environment.provider ?? "local");
        text(generation, environment.generation);
        text(ready, `${environment.ready} ready of ${environment.replicas}`);
        text(sessions, `${number(environment.sessions)} of ${environment.max_sessions ?? "?"}${environment.waiting ? `, ${environment.waiting} waiting` : ""}`);
        text(steps, number(environment.steps_per_second));
        text(restarts, environment.restarts);
        text(late, lag(environment.lag_p99_seconds));
        text(memory, size(environment.memory_bytes));
        text(serving, environment.serving?.sentence ?? "–");
        const error = environment.error;
        text(problem, error ? `${error.message}${error.hint ? ` Try: ${error.hint}` : ""}` : environment.sessions_fail ? `Sessions fail: ${environment.sessions_fail}` : "");
        problem.hidden = !problem.textContent;
        for (const each of buttons) each.disabled = isOver && each.textContent !== "Roll back";
        address.hidden = !environment.address || isOver;
        text(address.querySelector(".address"), environment.address);
        text(code, snippet(environment.address));
        const own = [...app.store.all("replicas").values()].filter((each) => each.environment === name).sort((a, b) => a.ordinal - b.ordinal || a.id.localeCompare(b.id));
        keyed(replicas.body, own, ({ id }) => id, replicaRow);
        const version = `${environment.generation} ${environment.state}`;
        if (version !== known) { known = version; showGenerations(); }
      },
      unmount: log.stop,
    };
  },
};
