// SPDX-License-Identifier: Apache-2.0
// What does not wait for the modules: the chosen colours (without a choice, the system's), and the
// first call of the stream, which the daemon answers while the modules are read (session.js).
"use strict";
{
  const chosen = localStorage.getItem("openenvd-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
  const key = localStorage.getItem("openenvd-key");
  if (key && ["", "#/"].includes(location.hash) && !document.hidden) {
    const stopping = new AbortController();
    const headers = { "X-Openenvd-Key": key };
    const answer = fetch("/v1/dashboard/stream", { headers, signal: stopping.signal, cache: "no-store" });
    answer.catch(() => {}); // reported where it is awaited
    window.firstStream = { answer, stopping };
  }
}
