// SPDX-License-Identifier: Apache-2.0
// What `dashboard.py` measures in a page, of which this is an initial script.
window.measure = {
  updates: [], // milliseconds of each
  longest: 0, // task over 50 ms
  isWatched: false,

  // When memory, a row of an environment and one of the queue are first painted, after the start of
  // the navigation: a task that is queued by the last callback before a frame runs after it.
  firstScreen: () => new Promise((resolve, reject) => {
    setTimeout(() => reject(new Error("nothing is shown")), 30000);
    const parts = ["#memory .memory-bar[aria-label]", "#environments tbody tr", "#queue tbody tr"];
    const look = () => {
      if (!parts.every(each => document.querySelector(each))) requestAnimationFrame(look);
      else requestAnimationFrame(() => setTimeout(() => resolve(performance.now())));
    };
    look();
  }),

  // Count from now on.
  watch() {
    this.updates = [];
    this.longest = 0;
    if (this.isWatched) return;
    this.isWatched = true;
    new PerformanceObserver(list => {
      for (const entry of list.getEntries()) {
        if (entry.name === "openenvd-update") this.updates.push(entry.duration);
      }
    }).observe({type: "measure"});
    new PerformanceObserver(list => {
      for (const {duration} of list.getEntries()) this.longest = Math.max(this.longest, duration);
    }).observe({type: "longtask"});
  },

  // When a death is shown, in seconds since 1970.
  deathShown: () => new Promise((resolve, reject) => {
    const look = () => document.querySelector("#faults article")
      ? resolve((performance.timeOrigin + performance.now()) / 1000) : setTimeout(look, 5);
    setTimeout(() => reject(new Error("no death is shown")), 30000);
    look();
  }),
};
