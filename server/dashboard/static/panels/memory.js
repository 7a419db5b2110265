// SPDX-License-Identifier: Apache-2.0
// Memory as one bar; what holds it, and the last hour, when it is short or the bar is opened.

import { attribute, h, number, size, svg, text } from "../dom.js";

const PARTS = [
  ["daemon", "Daemon"], ["workers", "Workers"], ["replicas", "Replicas"],
  ["other", "Other programs"], ["reserve", "Reserve"], ["free", "Free"],
];
const HOUR_SECONDS = 3600;
const WIDTH = 600;
const HEIGHT = 60;
const SAMPLE = ["limit", "daemon", "zygote", "workers", "replicas", "other", "reserve", "free"]; // in their places
const DRAWN = [["ours", [1, 2, 3]], ["replicas", [4]]];
const HEADROOM = 1.15;
const SHORT_SHARE = 0.1; // free of the limit
const used = (sample) => sample[1] + sample[2] + sample[3] + sample[4];

/** Areas above each other; a point for each sample. */
function areas(samples, now, most) {
  const x = (at) => WIDTH * (1 - (now - at) / HOUR_SECONDS);
  let below = samples.map(() => 0);
  return DRAWN.map(([name, indices]) => {
    const above = samples.map(([, sample], i) => below[i] + indices.reduce((sum, index) => sum + sample[index], 0) / most);
    const y = (share) => (HEIGHT * (1 - Math.min(1, share))).toFixed(1);
    const top = samples.map(([at], i) => `${x(at).toFixed(1)},${y(above[i])}`);
    const bottom = samples.map(([at], i) => `${x(at).toFixed(1)},${y(below[i])}`).reverse();
    below = above;
    return [name, [...top, ...bottom].join(" ")];
  });
}

export default {
  id: "memory",
  title: "Memory",
  place: "machine",
  kinds: ["memory", "samples", "requests"],
  mount(body, app) {
    const bar = h("div", { class: "memory-bar", role: "img" });
    const legend = h("dl", { class: "legend" });
    const parts = PARTS.map(([name, title]) => {
      const segment = h("span", { "data-part": name });
      const value = h("dd");
      bar.append(segment);
      legend.append(h("div", {}, h("dt", {}, h("i", { "data-part": name, "aria-hidden": "true" }), title), value));
      return { name, title, segment, value };
    });
    const limit = h("dd");
    legend.append(h("div", { class: "limit" }, h("dt", {}, "Limit"), limit));
    const chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", class: "hour" });
    const polygons = new Map(DRAWN.map(([name]) => [name, svg("polygon", { "data-part": name })]));
    chart.append(...polygons.values());
    const peakText = h("span");
    const hour = h("figure", {}, chart, h("figcaption", {}, h("span", {}, "1 hour ago"), peakText, h("span", {}, "now")));
    const words = h("span");
    const details = h("details", { ontoggle: () => details.open && drawHour() }, h("summary", {}, words, bar), legend, hour);
    body.append(details);
    let wasShort = false;

    const drawHour = () => {
      const samples = [...app.store.all("samples")].map(([at, sample]) => [Number(at), sample]).sort((a, b) => a[0] - b[0]);
      const memory = app.store.one("memory");
      if (memory) samples.push([app.now(), SAMPLE.map((name) => memory[name])]);
      const peak = Math.max(1, ...samples.map(([, sample]) => used(sample)));
      for (const [name, points] of areas(samples, app.now(), peak * HEADROOM)) attribute(polygons.get(name), "points", points);
      text(peakText, `ours, at most ${size(peak)}`);
      attribute(chart, "aria-label", `Memory over the last hour: openenvd and its replicas had ${size(peak)} at most, in ${number(samples.length)} samples`);
    };
    return {
      update(kinds) {
        const told = app.store.one("memory");
        if (!told) return;
        const memory = { ...told, daemon: told.daemon + told.zygote };
        const isShort = memory.free < SHORT_SHARE * memory.limit || [...app.store.all("requests").values()].some((each) => each.pending_reason?.includes("for memory"));
        if (isShort !== wasShort) details.open = isShort;
        wasShort = isShort;
        attribute(app.section, "data-tone", isShort ? "short" : null);
        if (kinds.has("memory")) {
          text(words, `${size(memory.limit - memory.free - memory.reserve)} of ${size(memory.limit)} used, ${size(memory.free)} free${isShort ? ": memory is short" : ""}`);
          const total = PARTS.reduce((sum, [name]) => sum + memory[name], 0) || 1;
          for (const { name, segment, value } of parts) {
            segment.style.width = `${(100 * memory[name]) / total}%`;
            text(value, size(memory[name]));
          }
          text(limit, size(memory.limit));
          attribute(bar, "aria-label", PARTS.map(([name, title]) => `${title} ${size(memory[name])}`).join(", ") + `; limit ${size(memory.limit)}`);
        }
        if (details.open) drawHour();
      },
    };
  },
};
