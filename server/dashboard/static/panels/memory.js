// SPDX-License-Identifier: Apache-2.0
// Memory as one bar; what holds it, and the last hour, when it is short or the bar is opened.

import { attribute, h, pageStyle, size, text } from "../dom.js";

const PARTS = [
  ["daemon", "Daemon"], ["workers", "Workers"], ["replicas", "Replicas"],
  ["other", "Other programs"], ["reserve", "Reserve"], ["free", "Free"],
];
const SHORT_SHARE = 0.1; // free of the limit
const MEGABYTE = 2 ** 20;

export default {
  id: "memory",
  title: "Memory",
  place: "machine",
  kinds: ["memory", "samples", "requests"],
  mount(body, app) {
    const bar = h("div", { class: "memory-bar", role: "img" });
    const legend = h("dl", { class: "legend" });
    const parts = PARTS.map(([name, title]) => {
      const [segment, value] = [h("span", { "data-part": name }), h("dd")];
      bar.append(segment);
      legend.append(h("div", {}, h("dt", {}, h("i", { "data-part": name, "aria-hidden": "true" }), title), value));
      return { name, segment, value };
    });
    const limit = h("dd");
    legend.append(h("div", { class: "limit" }, h("dt", {}, "Limit"), limit));
    const words = h("span");
    const details = h("details", { ontoggle: () => details.open && showHour() }, h("summary", {}, words, bar), legend);
    body.append(details);
    let wasShort = false;
    let chart = null; // of the last hour, once it is asked for

    async function showHour() {
      const [{ lineChart }] = await Promise.all([import("../charts.js"), pageStyle()]);
      if (!chart) details.append((chart = lineChart("The last hour", { unit: "MB", fromZero: true, names: ["openenvd and replicas", "replicas"] })).element);
      // A sample: limit, daemon, its starter of processes, workers, replicas, other, reserve, free.
      const samples = [...app.store.all("samples")].map(([at, sample]) => [Number(at), sample]).sort((a, b) => a[0] - b[0]);
      const line = (from) => samples.map(([at, sample]) => [at, sample.slice(from, 5).reduce((sum, part) => sum + part, 0) / MEGABYTE]);
      chart.draw([{ name: "openenvd and replicas", points: line(1) }, { name: "replicas", points: line(4) }]);
    }
    return {
      update(kinds) {
        const sample = app.store.one("memory");
        if (!sample) return;
        const memory = { ...sample, daemon: sample.daemon + sample.zygote };
        const isShort = memory.free < SHORT_SHARE * memory.limit || [...app.store.all("requests").values()].some((each) => each.pending_reason?.includes("for memory"));
        if (isShort !== wasShort) details.open = isShort;
        wasShort = isShort;
        attribute(app.section, "data-tone", isShort ? "short" : null);
        if (details.open && kinds.has("samples")) showHour();
        if (!kinds.has("memory")) return;
        const total = PARTS.reduce((sum, [name]) => sum + memory[name], 0) || 1;
        for (const { name, segment, value } of parts) {
          segment.style.width = `${(100 * memory[name]) / total}%`;
          text(value, size(memory[name]));
        }
        text(words, `${size(memory.limit - memory.free - memory.reserve)} of ${size(memory.limit)} used, ${size(memory.free)} free${isShort ? ": memory is short" : ""}`);
        text(limit, size(memory.limit));
        attribute(bar, "aria-label", PARTS.map(([name, title]) => `${title} ${size(memory[name])}`).join(", ") + `; limit ${size(memory.limit)}`);
      },
    };
  },
};
