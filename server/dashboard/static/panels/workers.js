// SPDX-License-Identifier: Apache-2.0
// Workers as a strip: what each runs, and its memory against its cap.

import { age, attribute, h, keyed, plural, size, text } from "../dom.js";

const SCHEDULES = { LONG: "Long requests", SHORT: "Short requests" };

function cell(app) {
  const kind = h("span", { class: "kind" });
  const runs = h("span", { class: "runs" });
  const since = age(0);
  const fill = h("span", { class: "fill" });
  const memory = h("span", { class: "amount" });
  const element = h("li", { class: "worker" },
    h("span", { class: "name" }), kind, h("span", { class: "task" }, runs, " ", since),
    h("span", { class: "meter", "aria-hidden": "true" }, fill), memory);
  element.update = (worker) => {
    text(element.firstChild, worker.name);
    text(kind, worker.guaranteed ? "" : "extra");
    attribute(element, "data-busy", worker.task_id ? "yes" : null);
    attribute(element, "data-burst", worker.guaranteed ? null : "yes");
    if (worker.task_id) {
      if (runs.dataset.id !== worker.task_id) {
        runs.dataset.id = worker.task_id;
        runs.replaceChildren(h("a", { href: `#/request/${worker.task_id}` }, worker.label));
      }
      since.dataset.since = app.store.get("requests", worker.task_id)?.started_at ?? "";
    } else {
      delete runs.dataset.id;
      text(runs, "idle");
    }
    since.hidden = !worker.task_id || !since.dataset.since;
    const cap = worker.cap_bytes ?? app.store.one("plan")?.budget_bytes;
    const share = cap && worker.rss_bytes ? Math.min(1, worker.rss_bytes / cap) : 0;
    fill.style.width = `${(share * 100).toFixed(1)}%`;
    attribute(fill, "data-tone", share > 0.9 ? "bad" : share > 0.75 ? "warn" : null);
    text(memory, `${size(worker.rss_bytes)} / ${worker.cap_bytes ? size(worker.cap_bytes) : "no cap"}`);
    element.title = `${worker.name} (pid ${worker.pid}) has run ${plural(worker.tasks_run, "request")}`;
  };
  return element;
}

export default {
  id: "workers",
  title: "Workers",
  place: "machine",
  kinds: ["workers", "plan", "requests"],
  mount(body, app) {
    const groups = Object.entries(SCHEDULES).map(([schedule, words]) => {
      const title = h("h3");
      const list = h("ul", { class: "strip", tabindex: "0", "aria-label": `Workers for ${words.toLowerCase()}` });
      body.append(title, list);
      return { schedule, words, title, list };
    });
    return {
      update() {
        const plan = app.store.one("plan");
        for (const { schedule, words, title, list } of groups) {
          const workers = [...app.store.all("workers").values()].filter((each) => each.schedule === schedule)
            .sort((a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }));
          const busy = workers.filter((each) => each.task_id).length;
          const key = schedule.toLowerCase();
          const planned = plan ? `; room for ${plan[`guaranteed_${key}`]}${plan[`burst_${key}`] ? `, up to ${plan[`burst_${key}`]} more while memory allows` : ""}` : "";
          text(title, `${words}: ${workers.length ? `${busy} busy of ${workers.length} started` : "none needed yet"}${planned}`);
          keyed(list, workers, (each) => each.name, () => cell(app));
        }
      },
    };
  },
};
