// SPDX-License-Identifier: Apache-2.0
// Questions before something is lost, and short announcements.

import { h, text } from "./dom.js";

const SAID_MILLISECONDS = 6000;

/**
 * Ask in a modal dialog; a promise of the fields' values, or null when it was cancelled.
 * `fields`: [{name, label, type, value, min, max, required, note}].
 */
export function ask({ title, text: body, action, danger = false, fields = [] }) {
  return new Promise((answer) => {
    const inputs = fields.map(({ label, note, name, ...rest }) => h("input", { id: `ask-${name}`, name, ...rest }));
    const confirm = h("button", { type: "submit", class: danger ? "danger" : "primary" }, action);
    const cancel = h("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
    const form = h("form", { onsubmit: (event) => {
      event.preventDefault();
      dialog.result = Object.fromEntries(inputs.map((each) => [each.name, each.type === "number" ? each.valueAsNumber : each.value]));
      dialog.close();
    } },
      h("h2", { id: "ask-title" }, title),
      body ? h("p", { id: "ask-text" }, body) : null,
      fields.map((field, index) => h("p", { class: "field" }, h("label", { htmlFor: inputs[index].id }, field.label), inputs[index], field.note ? h("small", {}, field.note) : null)),
      h("p", { class: "buttons" }, cancel, confirm));
    const dialog = h("dialog", { "aria-labelledby": "ask-title", "aria-describedby": body ? "ask-text" : null }, form);
    dialog.result = null;
    dialog.addEventListener("close", () => { dialog.remove(); answer(dialog.result); });
    document.body.append(dialog);
    dialog.showModal();
    (inputs[0] ?? (danger ? cancel : confirm)).focus();
  });
}

/** Ask for yes or no. */
export async function confirm(question) {
  return (await ask(question)) !== null;
}

let fading;

/** Announce something, to screen readers as well. */
export function say(message) {
  const place = document.getElementById("said");
  text(place, "");
  requestAnimationFrame(() => text(place, message)); // the same words again are announced again
  place.dataset.shown = "";
  clearTimeout(fading);
  fading = setTimeout(() => { delete place.dataset.shown; }, SAID_MILLISECONDS);
}
