// SPDX-License-Identifier: Apache-2.0
// What the stream has sent, by kind and id; and who listens to which kinds.

const EMPTY = new Map();
const UPDATES_MEASURED = 1000; // how long each took: performance.getEntriesByName("openenvd-update")

export class Store {
  #kinds = new Map();
  #changed = new Set();
  #listeners = new Set();
  #isScheduled = false;
  #updates = 0;

  constructor() {
    document.addEventListener("visibilitychange", () => this.#update()); // its frame may not come
  }

  all(kind) { return this.#kinds.get(kind) ?? EMPTY; }
  get(kind, id) { return this.all(kind).get(id); }
  one(kind) { return this.get(kind, ""); }

  /** Call `update(kinds)` when one of `kinds` has changed; returns what ends that. */
  listen(kinds, update) {
    const listener = { kinds: new Set(kinds), update };
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  snapshot({ put }) {
    for (const kind of this.#kinds.keys()) this.#changed.add(kind);
    this.#kinds = new Map(Object.entries(put).map(([kind, entities]) => [kind, new Map(Object.entries(entities))]));
    for (const kind of this.#kinds.keys()) this.#changed.add(kind);
    this.#schedule();
  }

  change({ put, drop }) {
    for (const [kind, entities] of Object.entries(put)) {
      if (!this.#kinds.has(kind)) this.#kinds.set(kind, new Map());
      const known = this.#kinds.get(kind);
      for (const [id, entity] of Object.entries(entities)) known.set(id, entity);
      this.#changed.add(kind);
    }
    for (const [kind, ids] of Object.entries(drop)) {
      for (const id of ids) this.#kinds.get(kind)?.delete(id);
      this.#changed.add(kind);
    }
    this.#schedule();
  }

  /** Several changes before a frame is drawn are one update. No frame of a hidden tab is drawn. */
  #schedule() {
    if (this.#isScheduled) return;
    this.#isScheduled = true;
    if (document.hidden) setTimeout(() => this.#update());
    else requestAnimationFrame(() => this.#update());
  }

  #update() {
    if (!this.#isScheduled) return;
    this.#isScheduled = false;
    const changed = this.#changed;
    this.#changed = new Set();
    performance.mark("update");
    for (const { kinds, update } of [...this.#listeners]) {
      if ([...kinds].some((kind) => changed.has(kind))) update(changed);
    }
    performance.measure("openenvd-update", "update");
    performance.clearMarks("update");
    if ((this.#updates += 1) % UPDATES_MEASURED === 0) performance.clearMeasures("openenvd-update");
  }
}
