// SPDX-License-Identifier: Apache-2.0
// One episode, step by step: what was observed, with its images, what was done, and the reward.

import { short } from "./charts.js";
import { h, plural } from "./dom.js";

const MAX_KEPT = 200; // steps in memory
const AHEAD = 8; // steps that are asked for before they are shown
const SPEEDS = [1, 2, 5, 10, 25]; // steps a second
const IMAGE_TYPES = new Set(["image/png", "image/jpeg", "image/gif", "image/webp"]);

/** Fill `stage` with the episode; `close()` of what is returned ends it. */
export function replay(stage, app, rolloutId, episodeId) {
  const steps = new Map();
  const title = h("h3", { tabindex: "-1" }, `Episode ${episodeId}`);
  const facts = h("p", { class: "quiet" });
  const slider = h("input", { type: "range", min: "0", max: "0", value: "0", "aria-label": "Step", oninput: () => { pause(); go(Number(slider.value)); } });
  const place = h("output", {});
  const speed = h("select", { "aria-label": "Steps a second" });
  const images = imageStrip();
  const figures = h("dl", { class: "tiles" });
  const [seen, done, info] = ["Observation", "Action", "Info"].map(textBox);
  const buttons = {
    first: button("First", () => go(0)),
    before: button("Previous", () => go(at - 1)),
    play: button("Play", () => (timer ? pause() : play())),
    next: button("Next", () => go(at + 1)),
  };
  speed.append(...SPEEDS.map((count) => h("option", { value: String(count) }, `${count} a second`)));
  speed.value = "5";
  const controls = h("div", { class: "replay-controls" }, Object.values(buttons), slider, place, speed);
  const texts = h("div", { class: "replay-texts" }, seen.element, done.element, info.element);
  stage.replaceChildren(title, facts, controls, figures, images.element, texts);

  let at = 0;
  let last = null; // the number of the step behind the last action, once it is known
  let timer = null;
  let asking = null;
  let isClosed = false;

  go(0).then(() => title.scrollIntoView({ block: "nearest" }));

  function button(title, action) {
    return h("button", { type: "button", onclick: action }, title);
  }

  function load(first) {
    return (asking ??= read(first).finally(() => { asking = null; }));
  }

  async function read(first) {
    const { steps: found, episode } = await app.api("GET", `/v1/rollouts/${rolloutId}/episodes/${episodeId}/steps?first=${first}`);
    for (const step of found) steps.set(step.number, step);
    for (const number of [...steps.keys()]) {
      if (steps.size > MAX_KEPT && Math.abs(number - at) > MAX_KEPT / 2) steps.delete(number);
    }
    last = episode.steps;
    slider.max = String(last);
    const seed = episode.seed === null ? null : `seed ${episode.seed}`;
    facts.textContent = [`${episode.status}, reward ${short(episode.total_reward)}`, seed, episode.failure_message].filter(Boolean).join("; ");
  }

  async function go(number) {
    const wanted = Math.max(0, last === null ? number : Math.min(number, last));
    at = wanted;
    try {
      while (!steps.has(wanted) && !isClosed && at === wanted) await load(wanted);
    } catch (error) {
      pause();
      facts.textContent = [error.message, error.hint].filter(Boolean).join("; ");
      return;
    }
    if (isClosed || at !== wanted) return; // another one was asked for meanwhile
    show(steps.get(wanted));
    const ahead = Math.min(wanted + AHEAD, last);
    if (!steps.has(ahead)) {
      let missing = wanted;
      while (steps.has(missing)) missing += 1;
      load(missing).catch(() => {});
    }
  }

  function play() {
    if (at === last) at = -1;
    buttons.play.textContent = "Pause";
    const tick = async () => {
      await go(at + 1);
      if (timer && at === last) pause();
      else if (timer) timer = setTimeout(tick, 1000 / Number(speed.value));
    };
    timer = setTimeout(tick, 0);
  }

  function pause() {
    clearTimeout(timer);
    timer = null;
    buttons.play.textContent = "Play";
  }

  function show(step) {
    slider.value = String(step.number);
    const name = step.is_end ? "end" : `step ${step.number}`;
    slider.setAttribute("aria-valuetext", `${name} of ${last}`);
    place.textContent = step.is_end ? `end, after ${plural(last, "step")}` : `step ${step.number} of ${last}`;
    buttons.first.disabled = buttons.before.disabled = step.number === 0;
    buttons.next.disabled = step.number === last;
    figures.replaceChildren(...(step.is_end ? [] : [["Reward", short(step.reward)], ["Done", String(step.done)]]).map(([name, value]) =>
      h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    images.show(step.images, name);
    seen.show(step.observation);
    done.show(step.action);
    info.show(step.info);
  }

  return {
    close() {
      isClosed = true;
      pause();
      images.close();
    },
  };
}

/** Images of an observation: `show(images, name)`; `close()` frees them. */
export function imageStrip() {
  const element = h("div", { class: "replay-images" });
  let urls = [];

  function close() {
    urls.forEach((url) => URL.revokeObjectURL(url));
    urls = [];
  }

  function imageOf(image, name) {
    const sides = `${image.width} × ${image.height}`;
    const caption = h("figcaption", {}, h("code", {}, image.place), ` ${sides}, ${short(image.bytes)} bytes`);
    if (!image.data || !IMAGE_TYPES.has(image.type)) {
      return h("figure", {}, h("p", {}, "too large to be shown here"), caption);
    }
    const bytes = Uint8Array.from(atob(image.data), (letter) => letter.charCodeAt(0));
    const url = URL.createObjectURL(new Blob([bytes], { type: image.type }));
    urls.push(url);
    const shown = h("img", { src: url, alt: `${image.place} at ${name}`, class: image.width < 160 ? "pixels" : null,
      onerror: () => shown.replaceWith(h("p", {}, "cannot be decoded")) });
    return h("figure", {}, shown, caption);
  }

  return { element, close, show(images, name) { close(); element.replaceChildren(...images.map((image) => imageOf(image, name))); } };
}

/** JSON as indented text, with lists of numbers and texts on one line; a text in it has no line breaks. */
const pretty = (value) =>
  JSON.stringify(value, null, 2).replaceAll(/\[[^[\]{}]*\]/g, (list) => list.replaceAll(/\n */g, " "));

export function textBox(name) {
  const text = h("pre", { tabindex: "0", role: "region", "aria-label": name });
  const element = h("div", {}, h("h4", {}, name), text);

  function show(value) {
    element.hidden = value === undefined;
    if (value === undefined) return;
    text.textContent = "value" in value ? pretty(value.value) : `${value.text}\n… the first ${value.text.length} of ${value.bytes} bytes`;
  }

  return { element, show };
}
