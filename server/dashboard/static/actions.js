// SPDX-License-Identifier: Apache-2.0
// What can be done to environments and requests. Whatever loses something asks first.

import { copyButton, h, plural, text } from "./dom.js";

/** Call, announce how it went; the answer, or false. */
async function doing(app, what, work) {
  try {
    const answer = await work();
    if (what) app.say(what);
    return answer;
  } catch (error) {
    app.say(`${error.message}${error.hint ? ` (${error.hint})` : ""}`);
    return false;
  }
}

const submitted = (app, what, operation, payload) =>
  doing(app, what, () => app.api("POST", "/v1/requests", { operation, payload }));

export const environmentActions = {
  async scale(app, environment) {
    const answer = await app.ask({
      title: `Scale ${environment.name}`,
      text: `It has ${plural(environment.replicas, "replica")}. With fewer, the youngest begin no session any more, and end with their last one.`,
      fields: [{ name: "replicas", label: "Replicas", type: "number", min: 1, max: 10000, step: 1, required: true, value: environment.replicas }],
      action: "Scale",
    });
    return answer ? submitted(app, `Scaling ${environment.name} to ${answer.replicas}`, "scale", { name: environment.name, replicas: answer.replicas }) : false;
  },
  async restart(app, environment) {
    const isSure = await app.confirm({
      title: `Restart ${environment.name}?`,
      text: `Its ${plural(environment.replicas, "replica")} are replaced one after another. Sessions go on until they end, or for ten minutes.`,
      action: "Restart", danger: true,
    });
    return isSure && submitted(app, `Restarting ${environment.name}`, "restart", { name: environment.name });
  },
  async down(app, environment) {
    const isSure = await app.confirm({
      title: `Take ${environment.name} down?`,
      text: `${plural(environment.sessions, "open session")} ${environment.sessions === 1 ? "ends" : "end"} with it. Its logs are kept.`,
      action: "Take down", danger: true,
    });
    if (isSure) await submitted(app, `Taking ${environment.name} down`, "down", { name: environment.name });
  },
};

export async function cancel(app, request, lost = "what it has done so far is lost") {
  const isSure = await app.confirm({
    title: `Cancel ${request.label}?`,
    text: request.state === "RUNNING" ? `It is running: ${lost}.` : "It has not begun.",
    action: "Cancel it", danger: request.state === "RUNNING",
  });
  return isSure && doing(app, `Cancelled ${request.label}`, () => app.api("POST", `/v1/requests/${request.id}/cancel`));
}

/** Whether a launch may run again: it replaces what another launch of that name runs by now. */
async function mayReplace(app, requestId) {
  const { request } = await app.api("GET", `/v1/requests/${requestId}`);
  const runs = request.operation === "launch" ? app.store.get("environments", request.environment) : null;
  if (!runs || runs.state === "STOPPED" || runs.request_id === request.id) return true;
  return app.confirm({
    title: `Replace ${runs.name}?`,
    text: `An environment of that name is there by now (generation ${runs.generation}). It is updated to what this earlier launch says; sessions that are open go on until they end.`,
    action: "Replace it", danger: true,
  });
}

/** Submit a request once more, with other `limits` (`{memory_mb}`), when these are given; whether it was. */
export async function retry(app, requestId, label, limits = {}) {
  if (!(await doing(app, null, () => mayReplace(app, requestId)))) return false;
  const answer = await doing(app, `${label} runs again`, () => app.api("POST", `/v1/requests/${requestId}/retry`, limits));
  if (answer) app.go(`#/request/${answer.request_id}`);
  return answer !== false;
}

// Commands that are buttons, and what each does.
const BUTTONS = [
  [/^openenv retry (\S+) --(session-)?memory (\d+)M$/, (app, [, id, session, megabytes], subject) => ({
    title: `Run again with ${megabytes} MB${session ? " a session" : ""}`,
    act: () => retry(app, id, subject, { [session ? "session_memory_mb" : "memory_mb"]: Number(megabytes) }) })],
  [/^openenv retry (\S+)$/, (app, [, id], subject) => ({ title: "Run again", act: () => retry(app, id, subject) })],
  [/^openenv (restart|scale) (\S+)/, (app, [, name, environment]) => ({
    title: name === "scale" ? "Scale" : "Restart", act: () => environmentActions[name](app, app.store.get("environments", environment)) })],
  [/^openenv cancel (\S+)$/, (app, [, id]) => ({ title: "Cancel it", act: () => cancel(app, app.store.get("requests", id)) })],
];

// Words with which the prose of a hint continues after a command.
const PROSE = /^(and|below|choose|ends|for|free|has|have|if|in|is|it|lists?|makes?|of|opens?|or|says|see|shows?|starts?|stops?|the|then|to|what|with|…)$/;

/** The first command of a hint, alone: "openenv logs NAME shows …" has "openenv logs NAME". */
export function commandIn(hint) {
  const at = hint?.search(/(^|[\s(])(openenv [a-z]|pip |uv |\/\S+ -m pip )/) ?? -1;
  if (at < 0) return null;
  const taken = [];
  for (const word of hint.slice(at).trim().replace(/^\(/, "").split(/ /)) {
    if (word === "" || PROSE.test(word)) break;
    taken.push(word.replace(/[;,.:)]+$/, ""));
    if (/[;,:)]$/.test(word)) break;
  }
  return taken.join(" ");
}

/** A hint as it is shown: its command with a button that copies it, and nothing else. */
export function hintOf(app, hint) {
  const command = commandIn(hint);
  if (!command) return [hint];
  const [before, after] = [hint.slice(0, hint.indexOf(command)), hint.slice(hint.indexOf(command) + command.length)];
  return [before, h("code", { class: "command" }, command), " ", copyButton(app, "command", () => command), after];
}

/** The button that carries out the command of a fault ({command, hint, subject}); hidden where it is for a terminal alone. */
export function commandButton(app, faultOf, done = () => {}) {
  let found = null;
  const button = h("button", { type: "button", class: "primary", onclick: async () => {
    if ((await found.act()) !== false) done();
  } });
  button.update = () => {
    const fault = faultOf();
    const command = fault?.command ?? commandIn(fault?.hint) ?? "";
    const [pattern, make] = BUTTONS.find(([each]) => each.test(command)) ?? [];
    found = pattern ? make(app, command.match(pattern), fault.subject) : null;
    button.hidden = !found;
    if (found) text(button, found.title);
  };
  button.update();
  return button;
}
