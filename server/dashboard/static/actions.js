// SPDX-License-Identifier: Apache-2.0
// What can be done to environments and requests. Whatever loses something asks first.

import { h, plural, text } from "./dom.js";

/** Call, announce how it went; the answer, or null. */
async function doing(app, what, work) {
  try {
    const answer = await work();
    if (what) app.say(what);
    return answer;
  } catch (error) {
    app.say(`${error.message}${error.hint ? ` (${error.hint})` : ""}`);
    return null;
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
    if (answer) await submitted(app, `Scaling ${environment.name} to ${answer.replicas}`, "scale", { name: environment.name, replicas: answer.replicas });
  },
  async restart(app, environment) {
    const isSure = await app.confirm({
      title: `Restart ${environment.name}?`,
      text: `Its ${plural(environment.replicas, "replica")} are replaced one after another. Sessions go on until they end, or for ten minutes.`,
      action: "Restart", danger: true,
    });
    if (isSure) await submitted(app, `Restarting ${environment.name}`, "restart", { name: environment.name });
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
  if (isSure) await doing(app, `Cancelled ${request.label}`, () => app.api("POST", `/v1/requests/${request.id}/cancel`));
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
  return answer !== null;
}

const moreOf = ({ memory_mb: all, session_memory_mb: session }) => (session ? `${session} MB a session` : `${all} MB`);

/** The button that does what a death for memory suggests; hidden where there is nothing that it can do. */
export function moreButton(app, deathOf, done = () => {}) {
  const button = h("button", { type: "button", class: "primary", onclick: async () => {
    const { again, subject } = deathOf();
    if (await retry(app, again.request_id, subject, again.limits)) done();
  } });
  button.update = () => {
    const again = deathOf()?.again;
    button.hidden = !again;
    if (again) text(button, `Run again with ${moreOf(again.limits)}`);
  };
  button.update();
  return button;
}
