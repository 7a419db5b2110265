// SPDX-License-Identifier: Apache-2.0
// Signing in, calls to the daemon, and the one stream of the window.
//
// The session is a cookie that no script sees, and a key that is kept for this origin alone: see
// server/api/security.py.

const KEY = "openenvd-key";
const RETRY_MILLISECONDS = 1000;
const HIDDEN_MILLISECONDS = 30000; // between two looks of a hidden window
const STREAMS = 3; // at once, of all windows: a browser has six connections to one server
const AWAY_MILLISECONDS = 2000; // between two looks of a window without a stream of its own
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
  const answer = await fetch(path, { cache: "no-store", ...options, headers });
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

/**
 * One of the browser's STREAMS, until the function that is returned is called; null: all are taken.
 * Where there are no locks (not HTTPS, and not this machine's own address), each window has one.
 */
async function takeStream() {
  for (let at = 0; at < STREAMS && navigator.locks; at += 1) {
    const release = await new Promise((taken) => {
      const hold = (lock) => (lock ? new Promise((released) => taken(released)) : taken(null));
      navigator.locks.request(`openenvd-stream-${at}`, { ifAvailable: true }, hold).catch(() => taken(null));
    });
    if (release) return release;
  }
  return navigator.locks ? null : () => {};
}

/** The stream of this window: what the daemon has, and the log that is shown. */
export class Stream {
  #log = null; // {name, onText, place}: up to where the text is here
  #stopping = new AbortController();
  #wake = () => {};

  constructor() {
    document.addEventListener("visibilitychange", () => this.#renew());
  }

  /** Follow a log, as `requests/ID`: `onText(text, isFirst)`; null ends that. */
  followLog(name, onText) {
    if (name === null && this.#log === null) return;
    this.#log = name === null ? null : { name, onText, place: "" };
    this.#renew();
  }

  /** Connect again, at once. */
  #renew() {
    this.#stopping.abort();
    this.#wake();
  }

  /**
   * Follow it until the page closes: `onEvent(name, data)`, and `onState` with how it stands.
   * A window that is hidden, or for which no stream is left, takes a snapshot and what is new of the
   * log each HIDDEN_MILLISECONDS or AWAY_MILLISECONDS; a hidden one, so that its title tells of a death.
   */
  async follow(onEvent, onState) {
    let first = takeFirst();
    let isAway = false; // no stream was left when this window last asked for one
    for (;;) {
      const stopping = (this.#stopping = new AbortController());
      const taking = document.hidden ? null : takeStream();
      if (isAway) isAway = !(await taking); // else awaited after the first snapshot, which it would delay
      const isLook = isAway || document.hidden;
      const log = this.#log;
      let isDone = false; // it has ended as it should
      if (log || isLook || stopping.signal.aborted) { first?.stopping.abort(); first = null; }
      try {
        const query = { ...(log && { log: log.name, place: log.place }), ...(isLook && { is_look: true }) };
        for await (const [event, data] of events(`/v1/dashboard/stream?${new URLSearchParams(query)}`, stopping.signal, first)) {
          if (event === "log") { log.place = data.place; log.onText(data.text, data.is_first); continue; }
          if (event === "snapshot") onState("connected");
          onEvent(event, data);
          if (event !== "snapshot") continue;
          isDone = isLook;
          if (isLook || (await taking)) continue;
          isAway = isDone = true;
          break;
        }
      } catch (error) {
        if (error.status === 401) {
          localStorage.removeItem(KEY);
          return onState("signed-out");
        }
      } finally {
        (await taking)?.();
      }
      first = null;
      const isRenewed = stopping.signal.aborted;
      stopping.abort();
      if (document.hidden) await this.#pause(HIDDEN_MILLISECONDS);
      else if (isRenewed) continue;
      else if (!isDone) { onState("lost"); await this.#pause(RETRY_MILLISECONDS); }
      else if (isLook || !log) await this.#pause(AWAY_MILLISECONDS); // else it looks at the log now
    }
  }

  #pause(milliseconds) {
    return new Promise((resume) => {
      const timer = setTimeout(resume, milliseconds);
      this.#wake = () => { clearTimeout(timer); resume(); };
    });
  }
}
