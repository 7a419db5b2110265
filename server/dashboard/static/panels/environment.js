// SPDX-License-Identifier: Apache-2.0
// One environment: figures, address and snippets, replicas, generations, its log, and what can be done.

import { environmentActions } from "../actions.js";
import { DELAY, age, copyButton, h, keyed, lag, number, size, state, table, text } from "../dom.js";
import { IS_OVER, addressOf } from "./environments.js";
import { logView } from "../log.js";

const snippet = (name) => `from openenvd import Client\nwith Client().environment("${name}").connect() as env:\n    print(env.reset())`;
const upstreamSnippet = (url) => `from openenv import GenericEnvClient\nwith GenericEnvClient(base_url="${url}").sync() as env:\n    print(env.reset())`;

const REPLICA = [["Replica"], ["State"], ["Sessions", "number"], ["Steps/s", "number p2"], ["Restarts", "number p2"], ["Delay", "number p2", DELAY], ["Memory", "number"], ["Pid", "number p2"]];

function replicaRow(first) {
  const shown = state(first.state);
  const cells = REPLICA.slice(2).map(([, kind]) => h("td", { class: kind }));
  const [sessions, steps, restarts, late, memory, pid] = cells;
  const element = h("tr", {}, h("th", { scope: "row" }, `${first.ordinal}`, " ", h("small", { class: "id" }, first.id)), h("td", {}, shown), cells);
  element.update = (replica) => {
    shown.update(replica.state);
    text(sessions, `${number(replica.sessions)}/${replica.max_sessions ? number(replica.max_sessions) : "?"}`);
    text(steps, number(replica.steps_per_second));
    text(restarts, replica.restarts);
    text(late, lag(replica.lag_p99_seconds));
    text(memory, size(replica.memory_bytes));
    text(pid, replica.pid ?? "–");
  };
  return element;
}

const whatHappened = (replica) => replica.exits[0]?.message ?? replica.message;

/** What happened to a replica, below its row. */
function messageRow() {
  const cell = h("td", { class: "why", colspan: REPLICA.length, "data-tone": "warn" });
  const element = h("tr", {}, cell);
  element.update = ({ replica }) => {
    const hint = replica.exits[0]?.hint;
    text(cell, `↳ ${whatHappened(replica)}${hint ? `. Try: ${hint}` : ""}`);
  };
  return element;
}

export default {
  id: "environment",
  title: "Environment",
  kinds: ["environments", "replicas", "faults"],
  mount(body, app, name) {
    text(app.heading, name);
    const shown = state("");
    const facts = h("dl", { class: "facts" });
    const fact = (title) => { const value = h("dd"); facts.append(h("div", {}, h("dt", {}, title), value)); return value; };
    const [how, source, provider, generation, ready, sessions, steps, restarts, late, memory, serving] =
      ["State", "Source", "Provider", "Generation", "Replicas", "Sessions", "Steps/s", "Restarts", "Delay", "Memory", "Served by"].map(fact);
    how.append(shown);
    const problem = h("p", { class: "notice bad", role: "status" });
    let now = null;
    const buttons = Object.entries({ Scale: environmentActions.scale, Restart: environmentActions.restart, "Take down": environmentActions.down })
      .map(([title, act]) => h("button", { type: "button", class: title === "Take down" ? "danger" : null, onclick: () => now && act(app, now) }, title));
    const play = h("a", { class: "button primary", href: `#/play/${encodeURIComponent(name)}`, title: "Reset and step by hand" }, "Play");
    const upstreamCode = h("pre", {}, "");
    const ownRoutes = h("p", {}, "This app has no sessions: call its own routes, such as ", h("code", {}, "POST /reset"), ".");
    const snippets = h("div", {},
      h("pre", {}, snippet(name)), copyButton(app, "snippet", () => snippet(name)),
      h("p", {}, "Or with OpenEnv's own client, of the package ", h("code", {}, "openenv"), ":"),
      upstreamCode, copyButton(app, "snippet of OpenEnv's client", async () => upstreamSnippet(await addressOf(app, name))));
    const address = h("section", { "aria-label": "Address" }, h("h3", {}, "Connect"),
      h("p", {}, h("code", { class: "address" }), " ", copyButton(app, "address", () => addressOf(app, name))), ownRoutes, snippets);
    const replicas = table(`Replicas of ${name}`, REPLICA);
    Object.assign(replicas.element, { tabIndex: 0, role: "region", ariaLabel: "Replicas" }); // it has no link: else no key scrolls it
    const options = h("pre");
    const generations = table(`Generations of ${name}`, [["Generation"], ["State"], ["Age", "number p2"], ["Launch"], ["Why", "p2"]]);
    const known = h("div", {}, facts, h("p", { class: "buttons" }, play, buttons), address, h("h3", {}, "Replicas"), replicas.element, h("h3", {}, "Generations"), generations.element, h("details", {}, h("summary", {}, "Options of the newest generation"), options));
    body.append(problem, known, h("h3", {}, "Log"));
    const log = logView(app, `environments/${name}`);
    body.append(log.element);

    let version = "";
    const showGenerations = async () => {
      let answer;
      try { answer = await app.api("GET", `/v1/environments/${encodeURIComponent(name)}`); } catch (error) { text(problem, error.message); return; }
      text(options, JSON.stringify(answer.environment.generations[0]?.spec, null, 2));
      generations.body.replaceChildren(...answer.environment.generations.map((each) => h("tr", {},
        h("th", { scope: "row" }, String(each.number)), h("td", {}, state(each.state)), h("td", { class: "number p2" }, age(each.created_at)),
        h("td", {}, h("a", { href: `#/request/${each.request_id}` }, each.request_id.slice(0, 8))), h("td", { class: "why p2" }, each.error ?? ""))));
    };
    return {
      update() {
        const environment = app.store.get("environments", name);
        known.hidden = !environment;
        problem.hidden = Boolean(environment);
        if (!environment) { text(problem, `There is no environment ${name}. It was taken down, or was never ready: its requests say why.`); return; }
        now = environment;
        const isOver = IS_OVER.has(environment.state);
        shown.update(environment.state);
        text(source, environment.source);
        text(provider, environment.provider ?? "local");
        text(generation, environment.generation);
        text(ready, `${environment.ready} ready of ${environment.replicas}`);
        text(sessions, `${number(environment.sessions)} of ${environment.max_sessions ? number(environment.max_sessions) : "?"}${environment.waiting ? `, ${environment.waiting} waiting` : ""}`);
        text(steps, number(environment.steps_per_second));
        text(restarts, environment.restarts);
        text(late, lag(environment.lag_p99_seconds));
        text(memory, size(environment.memory_bytes));
        text(serving, environment.serving?.sentence ?? "–");
        const why = environment.error?.message ?? environment.sessions_fail;
        const isToldAbove = [...app.store.all("faults").values()].some((fault) => !fault.is_seen && fault.kind === "failing" && fault.environment === name);
        text(problem, why ? `${environment.sessions_fail ? "No session can begin: " : ""}${why}` : "");
        problem.hidden = !why || isToldAbove;
        for (const each of buttons) each.disabled = isOver;
        address.hidden = !environment.address || isOver;
        ownRoutes.hidden = environment.serving?.has_sessions !== false;
        snippets.hidden = !ownRoutes.hidden;
        play.hidden = address.hidden || snippets.hidden;
        text(address.querySelector(".address"), environment.address);
        text(upstreamCode, upstreamSnippet(environment.address + (environment.has_token ? "?token=…" : ""))); // a copy has it
        const own = [...app.store.all("replicas").values()].filter((each) => each.environment === name).sort((a, b) => a.ordinal - b.ordinal || a.id.localeCompare(b.id));
        const rows = own.flatMap((replica) => (whatHappened(replica) ? [replica, { id: `${replica.id} message`, replica }] : [replica]));
        keyed(replicas.body, rows, ({ id }) => id, (item) => (item.replica ? messageRow() : replicaRow(item)));
        const newest = `${environment.generation} ${environment.state}`;
        if (newest !== version) { version = newest; showGenerations(); }
      },
      unmount: log.stop,
    };
  },
};
