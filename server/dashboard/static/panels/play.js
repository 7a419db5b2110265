// SPDX-License-Identifier: Apache-2.0
// One environment, reset and stepped by hand. The session is open as long as the page (server/dashboard/routes.py).

import { short } from "../charts.js";
import { h, plural, table, text } from "../dom.js";
import { imageStrip, textBox } from "../replay.js";
import { actionControl, schemaForm } from "../schema_form.js";

const MAX_FIELDS = 8; // of an action with more, optional ones are folded
const MAX_SHOWN = 200; // steps
const RESET = { properties: {
  seed: { type: "integer", description: "The same seed begins the same episode, where the environment takes one." },
  more: { type: "object", description: "Further arguments, as a JSON object." },
} };

export default {
  mount(body, app, name) {
    text(app.heading, `Play ${name}`);
    const path = `/v1/dashboard/play/${Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
    const problem = h("p", { class: "problem", role: "alert" });
    const waiting = h("span", { class: "quiet", role: "status" });
    const [played, asked] = [h("div", { class: "played" }), h("div")];
    const layout = h("div", { class: "play" }, asked, played);
    body.append(h("p", {}, h("a", { href: `#/environment/${encodeURIComponent(name)}` }, "Environment and log")), problem, layout);
    const end = () => app.fetch(path, { method: "DELETE", keepalive: true }).catch(() => {});
    addEventListener("pagehide", end);

    const button = (title, act, kind = null) => h("button", { type: "button", class: kind, onclick: act, disabled: true }, title);
    const buttons = {
      reset: h("button", { type: "submit", class: "primary" }, "Reset"),
      step: h("button", { type: "submit", class: "primary", disabled: true }, "Step"),
      random: button("Random step", () => step("random")), state: button("State", showState),
      test: button("Save as pytest", () => save(`test_${name.replaceAll(/\W/g, "_")}.py`, { name: "episode", label: "Episode", type: "number", min: 0, value: episode, required: true })),
      episodes: button("Save as episodes", () => save("played")),
    };
    let action = null; // the form of an action's fields
    let steps = []; // {number, action, answer} of this episode
    let [episode, total] = [0, 0];

    /** Call the environment, and show that its answer is awaited. */
    async function call(kind, data = {}) {
      text(problem, "");
      text(waiting, "Waiting for the environment…");
      const able = Object.values(buttons).filter((each) => !each.disabled);
      able.forEach((each) => { each.disabled = true; });
      try {
        const answer = await app.api("POST", path, { call: kind, data });
        if (answer.error) throw Object.assign(new Error(answer.error.message), answer.error);
        return answer;
      } finally {
        text(waiting, "");
        able.forEach((each) => { each.disabled = false; });
      }
    }

    const fail = (error, form) => {
      if (!form?.fail(error)) text(problem, [error.message, error.hint].filter(Boolean).join("; "));
    };

    async function begin() {
      const found = await call("begin", { environment: name });
      if (action) return; // again
      const names = Object.keys(found.properties);
      const schema = names.length ? found : { properties: { action: { type: "object", description: "As a JSON object." } } };
      const first = names.length > MAX_FIELDS ? found.required : Object.keys(schema.properties);
      const fields = schemaForm(schema, { first, title: "Optional fields", controlOf: actionControl });
      action = { ...fields, values: () => (names.length ? fields.values() : fields.values().action ?? {}),
        fill: (values) => fields.fill(names.length ? values : { action: values }) };
      const form = h("form", { novalidate: true, "aria-label": "Action", onsubmit: (event) => { event.preventDefault(); step("step"); },
        onkeydown: (event) => { if (event.key === "Enter" && !event.shiftKey && event.target.matches("textarea")) { event.preventDefault(); form.requestSubmit(); } } },
        h("h3", {}, "Action"), fields.element, h("p", { class: "buttons" }, buttons.step, buttons.random, buttons.state, h("small", {}, "Enter takes the step; Shift+Enter begins a line")));
      asked.append(form);
      layout.append(list.element);
    }

    const start = schemaForm(RESET, { first: ["seed"], title: "Further arguments", prefix: "reset", controlOf: actionControl });
    asked.append(h("form", { novalidate: true, "aria-label": "Reset", onsubmit: (event) => { event.preventDefault(); reset(); } },
      start.element, h("p", { class: "buttons" }, buttons.reset, buttons.test, buttons.episodes, waiting)));

    async function reset() {
      start.clear();
      try {
        const { more, ...seed } = start.values();
        const data = { ...seed, ...more };
        if (!action) await begin();
        const answer = await call("reset", data).catch(async (error) => {
          if (error.status !== 404) throw error;
          await begin(); // nothing was done for long, or the daemon was restarted
          return call("reset", data);
        });
        [steps, episode, total] = [[], answer.episode, 0];
        list.body.replaceChildren();
        add("reset", data, answer);
        Object.values(buttons).forEach((each) => { each.disabled = false; });
      } catch (error) { fail(error, start); }
    }

    async function step(kind) {
      action.clear();
      try {
        const answer = await call(kind, kind === "step" ? action.values() : {});
        total += Number(answer.reward) || 0;
        add(String(steps.at(-1).number + 1), answer.action.value, answer);
      } catch (error) { fail(error, action); }
    }

    async function showState() {
      try { state.show((await call("state")).state); } catch (error) { fail(error); }
    }

    async function save(value, ...more) {
      const note = "NAME.py becomes a test for pytest; any other path a folder, to which all episodes are added.";
      const path = { name: "path", label: "Path on the daemon's machine", value, required: true, note };
      const given = await app.ask({ title: "Save what was played", fields: [path, ...more], action: "Save" });
      if (!given) return;
      const say = ({ episodes, steps: count }) => app.say(`Saved ${plural(episodes, "episode")}, ${plural(count, "step")}, in ${given.path}`);
      await call("save", given).then(say, fail);
    }

    // What was played: a step of the history shows its answer, and fills the form with its action.
    const list = table("Steps, newest first", [["Step"], ["Action"], ["Reward", "number"]]);
    const [figures, note, images] = [h("dl", { class: "tiles" }), h("p", { role: "status" }), imageStrip()];
    const [seen, state] = [textBox("Observation"), textBox("State")];
    state.element.hidden = true;
    played.append(figures, note, images.element, seen.element, state.element);

    function add(title, of, answer) {
      const one = { number: steps.length ? steps.at(-1).number + 1 : 0, title, action: of, answer, total };
      const shown = of === undefined ? answer.action.text : JSON.stringify(of);
      steps.push(one);
      list.body.prepend(h("tr", {}, h("th", { scope: "row" }, h("button", { type: "button", class: "quiet small", onclick: () => { show(one); if (one.number && of) action.fill(of); } }, title)),
        h("td", { class: "why" }, h("span", { class: "clamp" }, shown)), h("td", { class: "number" }, short(answer.reward))));
      if (steps.length > MAX_SHOWN) { steps.shift(); list.body.lastChild.remove(); }
      show(one);
    }

    function show({ number, title, answer, total: sum }) {
      const tiles = { Episode: episode, Step: title, Reward: short(answer.reward), "Total reward": short(sum) };
      figures.replaceChildren(...Object.entries(tiles).map(([key, value]) => h("div", {}, h("dt", {}, key), h("dd", {}, value))));
      text(note, answer.done ? "The episode has ended; a reset begins another." : "");
      images.show(answer.images, `step ${number}`);
      seen.show(answer.observation);
      state.element.hidden = true;
    }

    begin().catch(fail);
    return { unmount() { removeEventListener("pagehide", end); images.close(); end(); } };
  },
};
