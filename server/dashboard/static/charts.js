// SPDX-License-Identifier: Apache-2.0
// Charts of our own, in SVG: lines over time, and a histogram. Each says in words what it shows.

import { duration, h, number, svg } from "./dom.js";

const WIDTH = 420;
const HEIGHT = 125;
const EDGE = { left: 46, right: 10, top: 10, bottom: 22 };
const [RIGHT, BOTTOM] = [WIDTH - EDGE.right, HEIGHT - EDGE.bottom];

/** A number with about three digits: 0.123, 12.3, 1,230, 45.6k. */
export function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${(value / 1e3).toPrecision(3)}k`;
  if (Number.isInteger(value)) return number(value);
  return size < 0.001 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

const scale = (least, most, from, to) => (value) => from + ((value - least) / (most - least || 1)) * (to - from);

const label = (x, y, words, anchor) => svg("text", { x, y, "text-anchor": anchor, class: "chart-label" }, words);

/** A figure with a title; `begin(least, most)` empties it, and draws the grid of its values. */
function frame(title, caption) {
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", class: "chart" });
  const element = h("figure", { class: "chart-figure" }, h("figcaption", {}, caption), drawing);
  function begin(least, most) {
    const y = scale(least, most, BOTTOM, EDGE.top);
    drawing.replaceChildren(...[least, (least + most) / 2, most].flatMap((value) => [
      svg("line", { x1: EDGE.left, x2: RIGHT, y1: y(value), y2: y(value), class: "chart-grid" }),
      label(EDGE.left - 5, y(value) + 4, short(value), "end"),
    ]));
    return y;
  }
  const end = (words, from, until) => {
    drawing.setAttribute("aria-label", `${title}: ${words}`);
    drawing.append(label(EDGE.left, HEIGHT - 6, from, "start"), label(RIGHT, HEIGHT - 6, until, "end"));
  };
  const empty = () => {
    drawing.replaceChildren(label(WIDTH / 2, HEIGHT / 2, "nothing yet", "middle"));
    end("nothing yet", "", "");
  };
  return { element, drawing, begin, end, empty };
}

function spread(values, fromZero) {
  const [least, most] = [fromZero ? 0 : Math.min(...values), Math.max(...values)];
  if (least !== most) return [least, most];
  const around = Math.abs(most) * 0.1 || 1;
  return [fromZero ? 0 : least - around, most + around];
}

const path = (points, x, y) => points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");

/**
 * Lines over time; with `names`, a key of them. `draw([{name, points: [[at, value], …], band: [[at, least, most], …]}])`: the
 * first line is the one that is described in words; a band is drawn behind its line.
 */
export function lineChart(title, { unit = "", fromZero = false, names = [] } = {}) {
  const key = names.map((name, line) => h("span", { class: "key" }, h("i", { "data-line": String(line) }), name));
  const { element, drawing, begin, end, empty } = frame(title, [unit ? `${title} (${unit})` : title, h("span", {}, key)]);

  function draw(lines) {
    const shown = lines.map((line) => ({ ...line, points: line.points.filter(([, value]) => Number.isFinite(value)) }));
    const points = shown.flatMap((line) => line.points);
    if (!points.length) return empty();
    const bands = shown.flatMap((line) => line.band || []);
    const y = begin(...spread([...points.map(([, value]) => value), ...bands.flatMap(([, a, b]) => [a, b])], fromZero));
    const times = points.map(([at]) => at);
    const [began, ended] = [Math.min(...times), Math.max(...times)];
    const x = scale(began, ended, EDGE.left, RIGHT);
    shown.forEach((line, place) => drawLine(line, place, x, y));
    const own = shown[0].points.map(([, value]) => value);
    const range = own.length ? `${short(Math.min(...own))} to ${short(Math.max(...own))}` : "";
    const name = shown.length > 1 ? `${shown[0].name} ` : "";
    end(`${name}${short(own.at(-1) ?? null)} at last, ${range} ${unit}`.trim(), "0 s", ended > began ? duration(ended - began) : "");
  }

  function drawLine({ band, points }, place, x, y) {
    if (band?.length > 1) {
      const [over, under] = [band.map(([at, , most]) => [at, most]), band.map(([at, least]) => [at, least]).reverse()];
      drawing.append(svg("path", { d: `${path(over, x, y)}${path(under, x, y).replace("M", "L")}Z`, class: "chart-band" }));
    }
    if (points.length === 1) drawing.append(svg("circle", { cx: x(points[0][0]), cy: y(points[0][1]), r: 3, class: "chart-dot" }));
    else if (points.length) drawing.append(svg("path", { d: path(points, x, y), class: `chart-line chart-line-${place}` }));
  }

  return { element, draw };
}

/** A histogram. `draw({least, most, mean, counts})`, or `draw(null)` when there is nothing. */
export function histogramChart(title) {
  const { element, drawing, begin, end, empty } = frame(title, title);

  function draw(histogram) {
    if (!histogram) return empty();
    const { least, most, mean, counts } = histogram;
    const y = begin(0, Math.max(...counts));
    const width = (RIGHT - EDGE.left) / counts.length;
    const value = (place) => short(least + ((most - least) * place) / counts.length);
    counts.forEach((count, place) => {
      const size = { x: EDGE.left + place * width + 0.5, y: y(count), width: Math.max(1, width - 1), height: BOTTOM - y(count) };
      drawing.append(svg("rect", { ...size, class: "chart-bar" }, svg("title", {}, `${value(place)} to ${value(place + 1)}: ${count}`)));
    });
    if (most > least) {
      const at = scale(least, most, EDGE.left, RIGHT)(mean);
      drawing.append(svg("line", { x1: at, x2: at, y1: EDGE.top, y2: BOTTOM, class: "chart-mean" }));
    }
    end(`${short(least)} to ${short(most)}, mean ${short(mean)}`, short(least), short(most));
  }

  return { element, draw };
}
