// SPDX-License-Identifier: Apache-2.0
// One request: its timeline, its live log, and why it failed.

import { cancel, commandButton, hintOf, retry } from "../actions.js";
import { age, attribute, clock, duration, h, showProgress, size, state, text } from "../dom.js";
import { logView } from "../log.js";

const READ_SECONDS = 3; // between two readings of a request that the stream does not have
const FINAL = new Set(["SUCCEEDED", "FAILED", "CANCELLED"]);

export default {
  id: "request",
  title: "Request",
  kinds: ["requests", "faults"],
  mount(body, app, id) {
    const shown = state("");
    const timeline = h("ol", { class: "timeline" });
    const problem = h("div", { class: "notice bad", role: "alert", hidden: true });
    const progress = h("p", { class: "progress", role: "status" });
    const facts = h("dl", { class: "facts" });
    const payload = h("pre");
    const result = h("pre");
    let now = null;
    const stop = h("button", { type: "button", onclick: () => now && cancel(app, now) }, "Cancel");
    const again = h("button", { type: "button", onclick: () => now && retry(app, now.id, now.label) }, "Retry");
    const more = commandButton(app, () => now && { hint: now.error?.hint, subject: now.label });
    const log = logView(app, `requests/${id}`);
    body.append(problem, h("p", {}, shown, " ", progress), timeline, facts, h("p", { class: "buttons" }, stop, again),
      h("h3", {}, "Log"), log.element,
      h("details", {}, h("summary", {}, "Payload and result"), payload, result));

    const step = (title, at, until, isNow) => h("li", { "aria-current": isNow ? "step" : null },
      h("span", { class: "what" }, title), h("time", {}, clock(at)), h("span", { class: "took" }, isNow ? age(at) : until ? duration(until - at) : ""));
    const show = (request) => {
      now = request;
      text(app.heading, request.label);
      shown.update(request.state);
      const isFinal = FINAL.has(request.state);
      timeline.replaceChildren(...[
        step(`waited${request.pending_reason ? `: ${request.pending_reason}` : ""}`, request.created_at, request.started_at ?? request.finished_at, !request.started_at && !isFinal),
        request.started_at ? step(`${isFinal ? "ran" : "runs"} on ${request.worker ?? "a worker"}`, request.started_at, request.finished_at, !isFinal) : null,
        isFinal ? step(request.state.toLowerCase(), request.finished_at) : null,
      ].filter(Boolean));
      const known = { Id: request.id, Kind: { LONG: "long request", SHORT: "short request" }[request.schedule], Attempt: `${request.attempts}`, Priority: request.priority, "Memory cap": size(request.memory_bytes), Peak: size(request.peak_bytes || null), Environment: request.environment ? h("a", { href: `#/environment/${request.environment}` }, request.environment) : "–" };
      if (request.operation === "rollout") known.Rollout = h("a", { href: `#/rollouts/${request.id}` }, "charts and episodes");
      facts.replaceChildren(...Object.entries(known).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
      text(payload, JSON.stringify(request.payload, null, 2));
      text(result, request.result === null ? "" : JSON.stringify(request.result, null, 2));
      showProblem(request.error, request.retried);
      more.update();
      stop.hidden = isFinal;
      again.hidden = !isFinal || request.state === "SUCCEEDED";
      if (isFinal) showProgress(progress, request);
    };
    const isToldAbove = () => [...app.store.all("faults").values()].some((fault) => !fault.is_seen && fault.page === `#/request/${now.id}` && fault.kind !== "waiting");
    const showProblem = (error, retried) => {
      attribute(problem, "data-kind", null);
      if (!error && retried) {
        problem.hidden = isToldAbove();
        problem.replaceChildren(h("p", {}, h("strong", {}, "Out of memory. "), retried.message, "."));
        return;
      }
      problem.hidden = !error || isToldAbove();
      if (!error) return;
      attribute(problem, "data-kind", error.kind);
      problem.replaceChildren(h("p", {}, h("strong", {}, error.kind === "oom_killed" ? "Out of memory. " : ""), error.message),
        error.hint ? h("p", { class: "buttons" }, more, h("span", {}, hintOf(app, error.hint))) : "",
        error.log_tail?.length ? h("pre", {}, error.log_tail.join("\n")) : "");
    };
    // The store has no payload and no result, and of a long queue the first requests alone.
    let known = null; // what is shown of the store's, when it was read last
    let readAt = 0;
    let asked = 0;
    let answered = 0;
    let isGone = false;
    const read = async () => {
      const number = (asked += 1);
      const isLate = () => isGone || number < answered; // answers may overtake each other
      readAt = app.now();
      try {
        const { request } = await app.api("GET", `/v1/requests/${id}`);
        if (!isLate()) { answered = number; show(request); }
      } catch (error) {
        if (!isLate()) { problem.hidden = false; text(problem, error.message); }
      }
    };
    read();
    const mayHaveChanged = () => !now || !FINAL.has(now.state);
    return {
      update() {
        if (now) problem.hidden = isToldAbove() || !(now.error || now.retried);
        const found = app.store.get("requests", now?.id ?? id) ?? null;
        if (found && !FINAL.has(found.state)) showProgress(progress, found);
        const version = found && JSON.stringify({ ...found, progress: null, place: null });
        if (version !== known && mayHaveChanged()) read();
        known = version;
      },
      tick(at) {
        if (known === null && mayHaveChanged() && at - readAt > READ_SECONDS) read();
      },
      unmount() { isGone = true; log.stop(); },
    };
  },
};
