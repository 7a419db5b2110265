// SPDX-License-Identifier: Apache-2.0
// The parts of the page: panels in the order of the overview, and pages by their name in `#/name/…`.

import deaths from "./panels/deaths.js";
import { later } from "./later.js";
import environments from "./panels/environments.js";
import memory from "./panels/memory.js";
import { ended, queue } from "./panels/requests.js";
import workers from "./panels/workers.js";

export const panels = [deaths, memory, environments, workers, queue, ended];
export const pages = {
  environment: later("environment", "Environment", ["environments", "replicas"]),
  request: later("request", "Request", ["requests"]),
  launch: later("launch", "Launch an environment", []),
  rollouts: later("rollouts", "Rollouts", ["rollouts"]),
};
