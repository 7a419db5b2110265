// SPDX-License-Identifier: Apache-2.0
// One log as it grows: colours as in a terminal, wrap, pause, search, download.
//
//   stream ──▶ arrived ──once a frame, for FRAME_MILLISECONDS──▶ lines ──▶ rows ──▶ those in sight are drawn
//
// A row is a line, or with wrap a part of one, as wide as the window. The window keeps MAX_LINES and
// MAX_CHARACTERS, and drops the oldest; while it is paused, what arrives waits within the same bound.

import { attribute, h, number, plural, text } from "./dom.js";

export const MAX_LINES = 50_000;
const MAX_CHARACTERS = 20_000_000;
const MAX_LINE = 20_000; // characters of one line
const FRAME_MILLISECONDS = 8;
const LINE_MILLISECONDS = 500; // for the rest of a line, before it is shown without
const ROW = 18; // pixels, as in pages.css
const BEYOND = 15; // rows that are drawn above and below those in sight
const WRAP = "openenvd-wrap";

const CONTROLS = /[\x00-\x08\x0b-\x1f\x7f]/;
const ESCAPES = /\x1b(?:\[([\d;]*)m|\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|.)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]/g;
const PLAIN = Object.freeze({});
const FLAGS = { 1: "bold", 2: "faint", 3: "italic", 4: "underline", 7: "inverse", 9: "strike" };
const CUBE = [0, 95, 135, 175, 215, 255];

function colour256(n) {
  if (n < 16) return `var(--ansi-${n})`;
  if (n > 231) return `rgb(${Array(3).fill(8 + (n - 232) * 10)})`;
  return `rgb(${[36, 6, 1].map((unit) => CUBE[Math.floor((n - 16) / unit) % 6])})`;
}

/** The style after the codes of one `ESC [ … m`. */
function styleAfter(style, codes) {
  const next = { ...style };
  const rest = (codes || "0").split(";").map(Number);
  while (rest.length) {
    const code = rest.shift();
    const side = code >= 40 && code < 50 ? "ground" : "ink";
    if (code === 0) for (const key of Object.keys(next)) delete next[key];
    else if (FLAGS[code]) next[FLAGS[code]] = true;
    else if (code === 22) delete next.bold, delete next.faint;
    else if (FLAGS[code - 20]) delete next[FLAGS[code - 20]];
    else if (code === 38 || code === 48) next[side] = rest.shift() === 5 ? colour256(rest.shift() ?? 0) : `rgb(${rest.splice(0, 3)})`;
    else if (code === 39 || code === 49) delete next[side];
    else if (code >= 30 && code < 48) next[side] = `var(--ansi-${code % 10})`;
    else if (code >= 90 && code < 98) next.ink = `var(--ansi-${code - 82})`;
    else if (code >= 100 && code < 108) next.ground = `var(--ansi-${code - 92})`;
  }
  return Object.keys(next).length ? next : PLAIN;
}

/** A line without control characters, its parts ({at, style}), and the style after it. */
function parse(raw, style) {
  const line = raw.slice(raw.lastIndexOf("\r", raw.length - 2) + 1); // what a progress bar has written last
  const parts = [{ at: 0, style }];
  let shown = "";
  let from = 0;
  for (const found of line.matchAll(ESCAPES)) {
    shown += line.slice(from, found.index);
    from = found.index + found[0].length;
    if (found[1] !== undefined) parts.push({ at: shown.length, style: (style = styleAfter(style, found[1])) });
  }
  return { line: { text: shown + line.slice(from), parts }, style };
}

const textOf = (line) => (typeof line === "string" ? line : line.text);

/** The first index of a sorted list whose number is at least `wanted`. */
function indexOf(sorted, wanted) {
  let [from, until] = [0, sorted.length];
  while (from < until) {
    const middle = (from + until) >> 1;
    if (sorted[middle] < wanted) from = middle + 1;
    else until = middle;
  }
  return from;
}

function styled(words, style) {
  const element = h("span", { class: Object.keys(style).filter((key) => style[key] === true).join(" ") }, words);
  if (style.ink) element.style.color = style.ink;
  if (style.ground) element.style.backgroundColor = style.ground;
  return element;
}

/** The log of `requests/ID` or `environments/NAME`, as it grows, until `stop()`. */
export function logView(app, name) {
  let lines; // text, or {text, parts} where there are colours
  let first; // the number of lines[0]: how many were dropped
  let left; // lines that were dropped before they were shown
  let characters;
  let [rowLine, rowFrom] = []; // of each row: the number of its line, and where in it it begins
  let [hits, searched, current] = []; // the numbers of lines with what is searched for, of the next to search, of the hit that was gone to
  let [arrived, waiting, unfinished] = []; // texts, their characters, and a line whose end has not come
  let style;
  let ending;
  let columns = Infinity;
  let isFollowing = true; // its end is in sight
  let isPaused = false;
  let isScheduled = false;
  let drawn = "";
  let version = 0;

  const space = h("div", { class: "log-space" });
  const rows = h("div", { class: "log-rows" });
  const ruler = h("span", { class: "unseen", "aria-hidden": "true" }, "0".repeat(100));
  const element = h("div", { class: "log", role: "log", tabindex: "0", "aria-label": "Log", "aria-live": "off", onscroll: () => {
    isFollowing = element.scrollHeight - element.scrollTop - element.clientHeight < 2 * ROW;
    schedule();
  } }, ruler, space, rows);
  const search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search the log", "data-search": "", spellcheck: "false", oninput: () => {
    [hits, searched, current] = [[], first, null];
    version += 1;
    schedule();
  }, onkeydown: (event) => { if (event.key === "Enter") { event.preventDefault(); go(event.shiftKey ? -1 : 1); } } });
  const found = h("output", {});
  const step = (title, label, by) => h("button", { type: "button", class: "quiet small", "aria-label": label, onclick: () => go(by) }, title);
  const wrap = h("input", { type: "checkbox", checked: localStorage.getItem(WRAP) !== "no", onchange: () => {
    localStorage.setItem(WRAP, wrap.checked ? "yes" : "no");
    measure();
  } });
  const pause = h("button", { type: "button", class: "quiet small", "aria-pressed": "false", onclick: () => {
    isPaused = !isPaused;
    attribute(pause, "aria-pressed", String(isPaused));
    schedule();
  } }, "Pause");
  const download = h("button", { type: "button", class: "quiet small", onclick: async () => {
    try {
      const [kind, key] = name.split("/");
      const answer = await app.fetch(`/v1/${kind}/${encodeURIComponent(key)}/logs`);
      const url = URL.createObjectURL(await answer.blob());
      h("a", { href: url, download: `${key}.log` }).click();
      setTimeout(() => URL.revokeObjectURL(url), 60_000);
    } catch (error) { app.say(error.message); }
  } }, "Download");
  const note = h("span", { class: "note" });
  const bar = h("p", { class: "log-bar", hidden: true }, search, found, step("↑", "Previous match", -1), step("↓", "Next match", 1),
    h("label", {}, wrap, " Wrap"), pause, download, note);

  function begin() {
    [lines, first, left, characters, rowLine, rowFrom, hits, searched, current] = [[], 0, 0, 0, [], [], [], 0, null];
    [arrived, waiting, unfinished, style] = [[], 0, "", PLAIN];
  }
  begin();

  function addRows(line, at) {
    const { length } = textOf(line);
    let from = 0;
    do {
      rowLine.push(at);
      rowFrom.push(from);
      from += columns;
    } while (from < length);
  }

  /** Begin the rows again when the window, or the choice to wrap, is another. */
  function measure() {
    const width = ruler.scrollWidth / 100 || 7.2;
    const now = wrap.checked ? Math.max(20, Math.floor((element.clientWidth - 20) / width)) : Infinity;
    if (now === columns) return;
    const top = rowLine[Math.floor(element.scrollTop / ROW)] ?? first;
    [columns, rowLine, rowFrom] = [now, [], []];
    lines.forEach((line, index) => addRows(line, first + index));
    version += 1;
    if (!isFollowing) { draw(); element.scrollTop = indexOf(rowLine, top) * ROW; }
    schedule();
  }

  function add(raw) {
    let line = raw.length > MAX_LINE ? `${raw.slice(0, MAX_LINE)} … ${number(raw.length - MAX_LINE)} more characters: Download has them` : raw;
    if (style !== PLAIN || CONTROLS.test(line)) ({ line, style } = parse(line, style));
    addRows(line, first + lines.length);
    lines.push(line);
    characters += textOf(line).length;
  }

  function drop() {
    let count = Math.max(0, lines.length - MAX_LINES);
    for (let at = 0; at < count; at += 1) characters -= textOf(lines[at]).length;
    for (; characters > MAX_CHARACTERS; count += 1) characters -= textOf(lines[count]).length;
    if (!count) return;
    lines.splice(0, count);
    first += count;
    const gone = indexOf(rowLine, first);
    rowLine.splice(0, gone);
    rowFrom.splice(0, gone);
    hits.splice(0, indexOf(hits, first));
    searched = Math.max(searched, first);
    if (!isFollowing) element.scrollTop -= gone * ROW;
  }

  function take(until) {
    while (arrived.length && performance.now() < until) {
      const words = arrived.shift();
      waiting -= words.length;
      const parts = (unfinished + words).split("\n");
      unfinished = parts.pop();
      parts.forEach(add);
      version += 1;
    }
    clearTimeout(ending); // the end of a line may have been cut off by the size of a message
    if (!arrived.length && unfinished) ending = setTimeout(() => { add(unfinished); unfinished = ""; version += 1; schedule(); }, LINE_MILLISECONDS);
    drop();
  }

  function searchOn(until) {
    const wanted = search.value.toLowerCase();
    const end = first + lines.length;
    if (!wanted) searched = end;
    while (searched < end && performance.now() < until) {
      for (const last = Math.min(end, searched + 500); searched < last; searched += 1) {
        if (textOf(lines[searched - first]).toLowerCase().includes(wanted)) hits.push(searched);
      }
    }
    const place = current === null ? "" : `${number(indexOf(hits, current) + 1)} of `;
    text(found, wanted ? `${place}${number(hits.length)}` : "");
    return searched < end;
  }

  function go(by) {
    if (!hits.length) return;
    const at = current === null ? indexOf(hits, rowLine[Math.floor(element.scrollTop / ROW)] ?? 0) - (by < 0) : indexOf(hits, current) + by;
    current = hits[(at + hits.length) % hits.length];
    isFollowing = false;
    element.scrollTop = indexOf(rowLine, current) * ROW - element.clientHeight / 2;
    version += 1;
    schedule();
  }

  /** The words of a row, with its colours, and what is searched for marked. */
  function rowAt(index) {
    const at = rowLine[index];
    const line = lines[at - first];
    const all = textOf(line);
    const from = rowFrom[index];
    const until = rowLine[index + 1] === at ? rowFrom[index + 1] : all.length;
    const row = h("div", { class: at === current ? "row current" : "row" });
    const parts = typeof line === "string" ? [{ at: 0, style: PLAIN }] : line.parts;
    const wanted = search.value.toLowerCase();
    parts.forEach((part, place) => {
      const words = all.slice(Math.max(from, part.at), Math.min(until, parts[place + 1]?.at ?? all.length));
      if (!words) return;
      const target = part.style === PLAIN ? row : styled("", part.style);
      if (target !== row) row.append(target);
      let done = 0;
      for (let hit = wanted ? words.toLowerCase().indexOf(wanted) : -1; hit >= 0; hit = words.toLowerCase().indexOf(wanted, done)) {
        target.append(words.slice(done, hit), h("mark", {}, words.slice(hit, hit + wanted.length)));
        done = hit + wanted.length;
      }
      target.append(words.slice(done));
    });
    return row;
  }

  function draw() {
    const height = rowLine.length * ROW;
    space.style.height = `${height}px`;
    if (isFollowing) element.scrollTop = height;
    const from = Math.max(0, Math.floor(element.scrollTop / ROW) - BEYOND);
    const until = Math.min(rowLine.length, Math.ceil((element.scrollTop + element.clientHeight) / ROW) + BEYOND);
    const now = `${version} ${from} ${until}`;
    if (now === drawn) return;
    drawn = now;
    rows.style.transform = `translateY(${from * ROW}px)`;
    rows.replaceChildren(...Array.from({ length: Math.max(0, until - from) }, (_, index) => rowAt(from + index)));
  }

  function frame() {
    isScheduled = false;
    const until = performance.now() + FRAME_MILLISECONDS;
    if (!isPaused) take(until);
    const isSearching = searchOn(until);
    attribute(element, "data-empty", lines.length ? null : "yes");
    bar.hidden = !lines.length;
    text(pause, isPaused ? `Resume${arrived.length ? " (more has arrived)" : ""}` : "Pause");
    text(note, `${plural(lines.length, "line")}${first + left ? `; ${number(first + left)} earlier ones are not kept here: Download has them` : ""}`);
    draw();
    if (isSearching || (arrived.length && !isPaused)) schedule();
  }

  function schedule() {
    if (isScheduled) return;
    isScheduled = true;
    if (document.hidden) setTimeout(frame, 100);
    else requestAnimationFrame(frame);
  }

  app.followLog(name, (words, isFirst) => {
    if (isFirst) begin();
    arrived.push(words);
    waiting += words.length;
    while (waiting > MAX_CHARACTERS) {
      const gone = arrived.shift();
      waiting -= gone.length;
      left += gone.split("\n").length - 1;
    }
    schedule();
  });
  const resized = new ResizeObserver(measure);
  resized.observe(element);
  return { element: h("div", { class: "log-view" }, bar, element), stop: () => { clearTimeout(ending); resized.disconnect(); app.followLog(null); } };
}
