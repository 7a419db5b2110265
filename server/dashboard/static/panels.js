// SPDX-License-Identifier: Apache-2.0
// The parts of the page: panels in the order of the overview, and pages by their name in `#/name/…`.

import { later } from "./later.js";
import environments from "./panels/environments.js";
import faults from "./panels/faults.js";
import memory from "./panels/memory.js";
import { ended, queue } from "./panels/requests.js";
import workers from "./panels/workers.js";

export const panels = [faults, environments, queue, ended, workers, memory];
export const pages = {
  environment: later("environment", "Environment", ["environments", "replicas", "faults"]),
  request: later("request", "Request", ["requests", "faults"]),
  launch: later("launch", "Launch an environment", []),
  play: later("play", "Play", []),
  requests: later("requests", "All requests", ["requests"]),
  rollouts: later("rollouts", "Rollouts", ["rollouts"]),
};
