// SPDX-License-Identifier: Apache-2.0
// Charts of our own, in SVG: lines over time, and a histogram. Each says in words what it shows.

import { number, svg } from "./dom.js";

const WIDTH = 420;
const HEIGHT = 125;
const EDGE = { left: 46, right: 10, top: 10, bottom: 22 };

/** A number with about three digits: 0.123, 12.3, 1,230, 45.6k. */
export function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${(value / 1e3).toPrecision(3)}k`;
  if (Number.isInteger(value)) return number(value);
  return size < 0.001 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

/** Seconds since something began: 1.5 s, 12 s, 3 min, 1.5 h. */
export function elapsed(seconds) {
  if (seconds < 10) return `${Math.round(seconds * 10) / 10} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function scale(least, most, from, to) {
  const span = most - least || 1;
  return (value) => from + ((value - least) / span) * (to - from);
}

function frame(title, unit) {
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", class: "chart" });
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  caption.append(unit ? `${title} (${unit})` : title);
  figure.className = "chart-figure";
  figure.append(caption, drawing);
  const label = (x, y, text, anchor) =>
    svg("text", { x, y, "text-anchor": anchor, class: "chart-label" }, text);
  return { figure, caption, drawing, label };
}

function spread(values, fromZero) {
  let least = fromZero ? 0 : Math.min(...values);
  let most = Math.max(...values);
  if (least === most) {
    const around = Math.abs(most) * 0.1 || 1;
    least = fromZero ? 0 : least - around;
    most += around;
  }
  return [least, most];
}

function grid(drawing, label, y, least, most) {
  for (const value of [least, (least + most) / 2, most]) {
    const at = y(value);
    drawing.append(
      svg("line", { x1: EDGE.left, x2: WIDTH - EDGE.right, y1: at, y2: at, class: "chart-grid" }),
      label(EDGE.left - 5, at + 4, short(value), "end"),
    );
  }
}

const path = (points, x, y) =>
  points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");

function keyOf(names) {
  const key = document.createElement("span");
  names.forEach((name, number) => {
    const [item, line] = [document.createElement("span"), document.createElement("i")];
    item.className = "key";
    line.dataset.line = number;
    item.append(line, name);
    key.append(item);
  });
  return key;
}

/**
 * Lines over time; with `names`, a key of them. `draw([{name, points: [[at, value], …], band: [[at, least, most], …]}])`: the
 * first line is the one that is described in words; a band is drawn behind its line.
 */
export function lineChart(title, { unit = "", fromZero = false, names = [] } = {}) {
  const { figure, caption, drawing, label } = frame(title, unit);
  if (names.length) caption.append(keyOf(names));

  function draw(lines) {
    const shown = lines.map((line) => ({
      ...line,
      points: line.points.filter(([, value]) => Number.isFinite(value)),
    }));
    const points = shown.flatMap((line) => line.points);
    drawing.replaceChildren();
    if (!points.length) {
      drawing.setAttribute("aria-label", `${title}: nothing yet`);
      drawing.append(label(WIDTH / 2, HEIGHT / 2, "nothing yet", "middle"));
      return;
    }
    const bands = shown.flatMap((line) => line.band || []);
    const values = [...points.map(([, value]) => value), ...bands.flatMap(([, a, b]) => [a, b])];
    const [least, most] = spread(values, fromZero);
    const times = points.map(([at]) => at);
    const [began, ended] = [Math.min(...times), Math.max(...times)];
    const x = scale(began, ended, EDGE.left, WIDTH - EDGE.right);
    const y = scale(least, most, HEIGHT - EDGE.bottom, EDGE.top);
    grid(drawing, label, y, least, most);
    drawing.append(label(EDGE.left, HEIGHT - 6, "0 s", "start"));
    if (ended > began)
      drawing.append(label(WIDTH - EDGE.right, HEIGHT - 6, elapsed(ended - began), "end"));
    shown.forEach((line, number) => drawLine(line, number, x, y));
    const [, last] = shown[0].points.at(-1) || [0, null];
    const name = shown.length > 1 ? `${shown[0].name} ` : "";
    const own = shown[0].points.map(([, value]) => value);
    const range = own.length ? `${short(Math.min(...own))} to ${short(Math.max(...own))}` : "";
    const summary = `${title}: ${name}${short(last)} at last, ${range} ${unit}`;
    drawing.setAttribute("aria-label", summary.trim());
  }

  function drawLine(line, number, x, y) {
    const kind = `chart-line chart-line-${number}`;
    if (line.band && line.band.length > 1) {
      const over = line.band.map(([at, , most]) => [at, most]);
      const under = line.band.map(([at, least]) => [at, least]).reverse();
      const area = `${path(over, x, y)}${path(under, x, y).replace("M", "L")}Z`;
      drawing.append(svg("path", { d: area, class: "chart-band" }));
    }
    if (line.points.length === 1) {
      const [[at, value]] = line.points;
      drawing.append(svg("circle", { cx: x(at), cy: y(value), r: 3, class: "chart-dot" }));
    } else if (line.points.length) {
      drawing.append(svg("path", { d: path(line.points, x, y), class: kind }));
    }
  }

  return { element: figure, draw };
}

/** A histogram. `draw({least, most, mean, counts})`, or `draw(null)` when there is nothing. */
export function histogramChart(title) {
  const { figure, drawing, label } = frame(title, "");

  function draw(histogram) {
    drawing.replaceChildren();
    if (!histogram) {
      drawing.setAttribute("aria-label", `${title}: nothing yet`);
      drawing.append(label(WIDTH / 2, HEIGHT / 2, "nothing yet", "middle"));
      return;
    }
    const { least, most, mean, counts } = histogram;
    const highest = Math.max(...counts);
    const y = scale(0, highest, HEIGHT - EDGE.bottom, EDGE.top);
    const width = (WIDTH - EDGE.left - EDGE.right) / counts.length;
    grid(drawing, label, y, 0, highest);
    counts.forEach((count, number) => {
      const top = y(count);
      const bar = svg("rect", {
        x: EDGE.left + number * width + 0.5,
        y: top,
        width: Math.max(1, width - 1),
        height: HEIGHT - EDGE.bottom - top,
        class: "chart-bar",
      });
      const from = least + ((most - least) * number) / counts.length;
      const until = least + ((most - least) * (number + 1)) / counts.length;
      bar.append(svg("title", {}, `${short(from)} to ${short(until)}: ${count}`));
      drawing.append(bar);
    });
    if (most > least) {
      const at = scale(least, most, EDGE.left, WIDTH - EDGE.right)(mean);
      drawing.append(
        svg("line", { x1: at, x2: at, y1: EDGE.top, y2: HEIGHT - EDGE.bottom, class: "chart-mean" }),
      );
    }
    drawing.append(
      label(EDGE.left, HEIGHT - 6, short(least), "start"),
      label(WIDTH - EDGE.right, HEIGHT - 6, short(most), "end"),
    );
    const summary = `${title}: ${short(least)} to ${short(most)}, mean ${short(mean)}`;
    drawing.setAttribute("aria-label", summary);
  }

  return { element: figure, draw };
}
