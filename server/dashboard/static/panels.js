// SPDX-License-Identifier: Apache-2.0
// The parts of the page: panels in the order of the overview, and pages by their name in `#/name/…`,
// whose modules and style are loaded when one of them is first shown.

import { pageStyle } from "./dom.js";
import environments from "./panels/environments.js";
import faults from "./panels/faults.js";
import memory from "./panels/memory.js";
import { ended, queue } from "./panels/requests.js";
import workers from "./panels/workers.js";

/** A page of `panels/<id>.js`. */
function later(id, title, kinds) {
  return {
    id: `page-${id}`, title, kinds,
    mount(body, app, argument) {
      let page = null;
      let isGone = false;
      Promise.all([import(`./panels/${id}.js`), pageStyle()]).then(([found]) => {
        if (isGone) return;
        page = found.default.mount(body, app, argument);
        if (app.store.one("daemon")) page.update?.(new Set(kinds));
      }, (error) => app.say(`This page could not be loaded: ${error.message}`));
      return {
        update: (changed) => page?.update?.(changed),
        tick: (now) => page?.tick?.(now),
        unmount() { isGone = true; page?.unmount?.(); },
      };
    },
  };
}

export const panels = [faults, environments, queue, ended, workers, memory];
export const pages = {
  environment: later("environment", "Environment", ["environments", "replicas", "faults"]),
  request: later("request", "Request", ["requests", "faults"]),
  launch: later("launch", "Launch an environment", []),
  play: later("play", "Play", []),
  requests: later("requests", "All requests", ["requests"]),
  rollouts: later("rollouts", "Rollouts", ["rollouts"]),
};
