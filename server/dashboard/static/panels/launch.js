// SPDX-License-Identifier: Apache-2.0
// The form that launches an environment, made of the schema that the daemon has of the operation.

import { attribute, h, text } from "../dom.js";
import { schemaForm } from "../schema_form.js";

const FIRST = ["source", "name", "provider", "replicas", "max_replicas", "max_sessions", "memory_mb", "env"];
const OF_THE_DAEMON = ["replaces"]; // which it fills in itself
const OF_REQUESTS = ["priority", "timeout_seconds", "retry_oom"];

export default {
  mount(body, app) {
    const problem = h("p", { class: "problem", role: "alert" });
    body.append(problem);
    let isGone = false;
    Promise.all([app.api("GET", "/openapi.json"), app.api("GET", "/v1/dashboard/sources")]).then(([described, known]) => {
      if (!isGone) showForm(body, app, problem, described.components.schemas, known);
    }, (error) => text(problem, error.message));
    return { unmount() { isGone = true; } };
  },
};

function showForm(body, app, problem, schemas, known) {
  const request = schemas.LaunchRequest;
  const payload = schemas[request.properties.payload.$ref.split("/").at(-1)];
  const hidden = Object.keys(request.properties).filter((name) => !OF_REQUESTS.includes(name));
  const launch = schemaForm(payload, { first: FIRST, hidden: OF_THE_DAEMON });
  const queued = schemaForm(request, { first: [], hidden, title: "How it is queued" });
  const button = h("button", { type: "submit", class: "primary" }, "Launch");
  const form = h("form", { novalidate: true, class: "schema-form" }, launch.element, queued.element, problem,
    h("p", { class: "buttons" }, button));

  const [source, folder] = ["source", "cwd"].map((name) => launch.fields.get(name).control);
  folder.placeholder = known.folder;
  const choices = { "Comes with openenvd:": known.bundled.map((name) => ({ source: name, cwd: "" })), "Launched lately:": known.recent };
  attribute(source, "list", "sources");
  form.prepend(h("datalist", { id: "sources" }, Object.values(choices).flat().map((each) => h("option", { value: each.source }))),
    ...Object.entries(choices).filter(([, found]) => found.length).map(([title, found]) => h("p", { class: "buttons" }, h("small", {}, title), found.map((each) =>
      h("button", { type: "button", class: "quiet small", title: each.cwd, onclick: () => { [source.value, folder.value] = [each.source, each.cwd]; source.focus(); } }, each.source)))));

  /** What is typed, with its paths as the user's shell reads them. */
  async function values() {
    const { source: typed = "", cwd = known.folder, ...others } = launch.values();
    const read = await app.api("GET", `/v1/dashboard/paths?${new URLSearchParams({ source: typed, cwd })}`);
    return { ...others, ...(typed && { source: read.source }), cwd: read.cwd };
  }

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    launch.clear();
    queued.clear();
    text(problem, "");
    button.disabled = true;
    try {
      const made = await app.submit("launch", await values(), queued.values());
      app.say(`${made.label} is queued`);
      app.go(`#/request/${made.id}`);
    } catch (error) {
      const failure = { ...error, message: error.message, field: error.field };
      if (!launch.fail(failure) && !queued.fail(failure)) text(problem, [error.message, error.hint].filter(Boolean).join("; "));
    } finally {
      button.disabled = false;
    }
  });
  body.append(form);
  launch.fields.get("source").control.focus();
}
