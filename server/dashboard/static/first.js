// SPDX-License-Identifier: Apache-2.0
// The first call of the stream, which the daemon answers while the modules are read (session.js).
"use strict";
{
  const key = localStorage.getItem("openenvd-key");
  if (key && ["", "#/"].includes(location.hash) && !document.hidden) {
    const stopping = new AbortController();
    const headers = { "X-Openenvd-Key": key };
    const answer = fetch("/v1/dashboard/stream", { headers, signal: stopping.signal, cache: "no-store" });
    answer.catch(() => {}); // reported where it is awaited
    window.firstStream = { answer, stopping };
  }
}
