// SPDX-License-Identifier: Apache-2.0
// Signing in, calls to the daemon, and the stream.
//
// The session is a cookie that no script sees, and a key that is kept for this origin alone: see
// server/api/browser_sessions.py.

const KEY = "openenvd-key";
const RETRY_MILLISECONDS = 1000;
const SILENCE_MILLISECONDS = 40000; // the daemon sends a comment each 15 seconds

export class CallFailed extends Error {
  constructor(status, error) {
    super(error.message);
    this.status = status;
    this.hint = error.hint;
    this.kind = error.kind;
    this.field = error.field;
  }
}

/** Take the code out of the address, and sign in with it; true, unless there is no session. */
export async function signIn() {
  const code = location.hash.slice(1);
  if (code && !code.startsWith("/")) {
    history.replaceState(null, "", location.pathname);
    const answer = await fetch("/dashboard/session", {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ code }),
    });
    if (answer.ok) localStorage.setItem(KEY, (await answer.json()).key);
    else if (!localStorage.getItem(KEY)) throw await failure(answer);
  }
  return localStorage.getItem(KEY) !== null;
}

/** `fetch`, signed in. Raises what the daemon refuses. */
export async function call(path, options = {}) {
  const headers = { "X-Openenvd-Key": localStorage.getItem(KEY) ?? "", ...options.headers };
  const answer = await fetch(path, { ...options, headers });
  if (!answer.ok) throw await failure(answer);
  return answer;
}

export async function api(method, path, body) {
  const options = { method };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers = { "Content-Type": "application/json" };
  }
  const answer = await call(path, options);
  return answer.status === 204 ? null : answer.json();
}

async function failure(answer) {
  let error = { message: `HTTP ${answer.status}`, hint: null, kind: "http" };
  try { error = (await answer.json()).error ?? error; } catch { /* no JSON: a proxy's answer */ }
  return new CallFailed(answer.status, error);
}

/** The call of first.js, once; null where there was none. */
function takeFirst() {
  const first = window.firstStream ?? null;
  window.firstStream = null;
  return first;
}

/** Server-sent events of one call, or of one that was made already: [event, data] until it ends. */
export async function* events(path, signal, first = null) {
  const silence = new AbortController();
  let timer;
  const heard = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silence.abort(new Error("the daemon is silent")), SILENCE_MILLISECONDS);
  };
  heard();
  try {
    const either = AbortSignal.any([signal, silence.signal]);
    either.addEventListener("abort", () => first?.stopping.abort(either.reason));
    const answer = first ? await first.answer : await call(path, { signal: either });
    if (!answer.ok) throw await failure(answer);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let waiting = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      heard();
      waiting += value;
      const parts = waiting.split("\n\n");
      waiting = parts.pop();
      for (const part of parts) {
        const fields = Object.fromEntries(part.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
        if (fields.data !== undefined) yield [fields.event ?? "message", JSON.parse(fields.data)];
      }
    }
  } finally {
    clearTimeout(timer);
  }
}

/** Follow the one stream, for ever: `onEvent(name, data)`, and `onState` with how it stands. */
export async function followAll(onEvent, onState) {
  const never = new AbortController();
  for (;;) {
    try {
      for await (const [name, data] of events("/v1/dashboard/stream", never.signal, takeFirst())) {
        if (name === "snapshot") onState("connected");
        onEvent(name, data);
      }
      onState("lost");
    } catch (error) {
      if (error.status === 401) {
        localStorage.removeItem(KEY);
        return onState("signed-out");
      }
      onState("lost");
    }
    await new Promise((resume) => setTimeout(resume, RETRY_MILLISECONDS));
  }
}
