// SPDX-License-Identifier: Apache-2.0
// Elements, keyed lists, and how sizes, durations and states are written.

const PROPERTIES = new Set(["value", "disabled", "hidden", "open", "htmlFor"]); // not `checked`, whose attribute is the default

/** An element: attributes, `on…` listeners, properties; children are elements, text, or null. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (PROPERTIES.has(name)) element[name] = value;
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** The same of a drawing, by attributes alone. */
export function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Set the text of an element, if it is another. */
export function text(element, value) {
  const wanted = String(value ?? "");
  if (element.textContent !== wanted) element.textContent = wanted;
  return element;
}

/** Set an attribute, if it is another; null removes it. */
export function attribute(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

const rows = new WeakMap();

/**
 * Make the children of `parent` those of `items`, in their order, and keep what is there:
 * `make(item)` returns an element, with an `update(item)` of its own when it can change.
 */
export function keyed(parent, items, key, make) {
  const before = rows.get(parent) ?? new Map();
  const after = new Map();
  let next = parent.firstChild;
  for (const item of items) {
    const name = key(item);
    const element = before.get(name) ?? make(item);
    before.delete(name);
    after.set(name, element);
    element.update?.(item);
    if (element === next) next = next.nextSibling;
    else parent.insertBefore(element, next);
  }
  for (const gone of before.values()) gone.remove();
  rows.set(parent, after);
}

/** 1.4 GB, 310 MB, 4 kB. */
export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const megabytes = bytes / 2 ** 20;
  if (megabytes < 0.05) return `${Math.ceil(bytes / 1024)} kB`;
  if (megabytes >= 9999.5) return `${(megabytes / 1024).toFixed(0)} GB`;
  if (megabytes >= 999.5) return `${(megabytes / 1024).toFixed(1)} GB`;
  return `${megabytes.toFixed(megabytes < 9.95 ? 1 : 0)} MB`;
}

/** 0.4 s, 12 s, 3 min, 2 h 5 min, 3 d. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  const s = Math.max(0, seconds);
  if (s < 9.95) return `${s.toFixed(1)} s`;
  if (s < 99.5) return `${s.toFixed(0)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

/** 4 ms, 1.2 s. */
export function lag(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  return seconds < 1 ? `${(seconds * 1000).toFixed(0)} ms` : `${seconds.toFixed(1)} s`;
}

/** 1,234.5. Not by `toLocaleString`, whose first call loads locales for 50 ms, before the first screen. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  const [whole, part] = String(Math.round(value * 10) / 10).split(".");
  return whole.replace(/\B(?=(\d{3})+$)/g, ",") + (part ? `.${part}` : "");
}

export function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}

export function clock(at) {
  return at ? new Date(at * 1000).toTimeString().slice(0, 8) : "–"; // 23:59:59 GMT+0100 (…)
}

/** `3 s` ago, kept right by `tick`: the element's own age, without a redraw of its row. */
export function age(at, prefix = "") {
  return h("time", { "data-since": at ?? "", "data-prefix": prefix, datetime: at ? new Date(at * 1000).toISOString() : null });
}

export function renewAges(root, now) {
  for (const element of root.querySelectorAll("time[data-since]")) {
    const since = element.dataset.since;
    text(element, since ? element.dataset.prefix + duration(now - Number(since)) : "–");
  }
}

// A state is a word and a shape as well as a colour.
const SHAPES = {
  READY: ["●", "good"], SUCCEEDED: ["✓", "good"], RUNNING: ["▶", "live"], STARTING: ["◐", "live"],
  PENDING: ["○", "wait"], ASLEEP: ["◌", "wait"], DRAINING: ["◒", "wait"], STOPPING: ["◒", "wait"],
  STOPPED: ["■", "wait"], CANCELLED: ["⊘", "wait"], DEGRADED: ["▲", "warn"], BACKING_OFF: ["↻", "warn"],
  FAILED: ["✕", "bad"], FAILING: ["✕", "bad"], SERVING: ["●", "good"], RETIRED: ["■", "wait"],
};

export function state(name) {
  const element = h("span", { class: "state" }, h("span", { class: "shape", "aria-hidden": "true" }), h("span"));
  element.update = (value) => {
    const [shape, tone] = SHAPES[value] ?? ["○", "wait"];
    text(element.firstChild, shape);
    text(element.lastChild, String(value ?? "").toLowerCase().replace("_", " "));
    attribute(element, "data-tone", tone);
  };
  element.update(name);
  return element;
}

/** What a request that runs does now, how far it is, and how long it takes yet; nothing else. */
export function showProgress(element, request) {
  const now = (request.state === "RUNNING" && request.progress) || {};
  const [bar, words] = element.children.length ? element.children : [h("progress"), h("span")];
  if (!bar.parentNode) element.append(bar, " ", words);
  bar.hidden = !(now.total > 0);
  attribute(bar, "max", now.total);
  attribute(bar, "value", now.done);
  attribute(bar, "aria-label", now.message);
  const left = now.eta_seconds ?? null;
  const most = now.at_most_seconds ?? null;
  const estimate = left !== null ? `, about ${duration(left)} left` : most !== null ? `, up to ${duration(most)}` : "";
  text(words, (now.message ?? "") + estimate);
}

/** A button that copies what `what()` returns. */
export function copyButton(app, label, what) {
  return h("button", { type: "button", class: "quiet small copy", "aria-label": `Copy ${label}`, title: `Copy ${label}`, onclick: async () => {
    try {
      await navigator.clipboard.writeText(await what());
      app.say(`Copied ${label}`);
    } catch (error) {
      app.say(`Could not copy ${label}: ${error.message}`);
    }
  } }, "Copy");
}

export const DELAY = "How late its server gets to its work, but for the slowest hundredth";

/** A table: `columns` are [title, class, help]; returns its element and its body. A click on one of the first `count` columns calls `sort` with it. */
export function table(caption, columns, count = 0, sort = null) {
  const body = h("tbody");
  const head = h("tr", {}, columns.map(([title, kind, help], at) => h("th", { scope: "col", class: kind, title: help },
    at < count ? h("button", { type: "button", class: "sort", onclick: () => sort(at, head.children) }, title) : title)));
  const element = h("table", {}, h("caption", { class: "unseen" }, caption), h("thead", {}, head), body);
  return { element: h("div", { class: "scroll" }, element), body, table: element };
}

let styled = null;

/** Load the style of pages; once. */
export function pageStyle() {
  styled ??= new Promise((loaded) => {
    const link = h("link", { rel: "stylesheet", href: new URL("pages.css", import.meta.url).href, onload: loaded, onerror: loaded });
    document.head.append(link);
  });
  return styled;
}
